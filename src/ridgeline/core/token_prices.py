"""Prices of tokens: what a request is billed, apart from what it costs the device.

Reads and writes of the prefix cache are factors of the price of an input token. The defaults are Anthropic's published prices:
0.1 for a read, 1.25 for a write with a lifetime of five minutes, 2 with one of an hour. These writes include their storage, so
storage has no price of its own by default. A read here is every token that the cache had, with or without a breakpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ridgeline.core.errors import ConfigError

_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")


@dataclass(frozen=True, slots=True)
class Billable:
    """Tokens of a request.

    input includes cached and written. written: by lifetime. token_s: tokens times seconds of storage that it added. repeated: the
    whole answer came from the answer cache.
    """

    input: int
    cached: int
    output: int
    written: Mapping[str, int] = field(default_factory=dict)
    token_s: float = 0.0
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """input, output: US dollars per million tokens, 0: unknown. The others are factors of them.

    storage: a token that is kept for an hour. answer: all tokens of an answer from the answer cache.
    """

    input: float = 0.0
    output: float = 0.0
    read: float = 0.1
    write_5m: float = 1.25
    write_1h: float = 2.0
    storage: float = 0.0
    answer: float = 0.1

    @staticmethod
    def parse(text: str) -> TokenPrices:
        """Read `input=0.2,output=0.6,read=0.1,write-5m=1.25,write-1h=2,storage=0,answer=0.1`; what is missing has its default.

        Raises ConfigError that names the part.
        """
        names = {entry.name.replace("_", "-"): entry.name for entry in fields(TokenPrices)}
        values: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in names or names[name] in values or not _NUMBER.fullmatch(value):
                raise ConfigError(
                    f"--token-prices {part!r} is not a price: give each of {', '.join(names)} at most once, as in input=0.2.",
                    param="token_prices",
                )
            values[names[name]] = float(value)
        return TokenPrices(**values)

    def bill(self, tokens: Billable, factor: float = 1.0) -> dict[str, Any]:
        """Input and output tokens at their full price that cost as much, and US dollars: None without both prices.

        factor: of the dollars, for rows of batches.
        """
        if tokens.repeated:
            inputs, outputs = self.answer * tokens.input, self.answer * tokens.output
        else:
            writes = {"5m": self.write_5m, "1h": self.write_1h}
            computed = tokens.input - tokens.cached - sum(tokens.written.values())
            written = sum(writes[ttl] * count for ttl, count in tokens.written.items())
            inputs = computed + self.read * tokens.cached + written + self.storage * tokens.token_s / 3600
            outputs = float(tokens.output)
        usd = None
        if self.input and self.output:
            usd = factor * (inputs * self.input + outputs * self.output) / 1e6
        return {"input_tokens": inputs, "output_tokens": outputs, "usd": usd}
