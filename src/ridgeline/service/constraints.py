"""The grammar of a chat completion: what its fields, its tools and a budget of reasoning allow, one after the other."""

from __future__ import annotations

import dataclasses

from ridgeline.core.errors import BadGrammar, RequestError, UnsupportedField
from ridgeline.core.sampling import SamplingParams
from ridgeline.service.fields import Fields
from ridgeline.service.sampling import check_grammar, grammar_field
from ridgeline.service.state import Service
from ridgeline.text.grammar import MAX_SOURCE
from ridgeline.text.prompts import ChatEncoder
from ridgeline.text.reasoning import starts_inside
from ridgeline.text.tool_grammar import TextTags, bound_reasoning, can_bound, harmony_grammar, tool_grammar
from ridgeline.text.tools import ToolChoice

BUDGET_FIELDS = ("max_thinking_tokens", "thinking_token_budget")
EFFORT_BUDGETS = {"none": 0, "minimal": 512, "low": 2048}
"""Tokens of reasoning by `reasoning_effort`, for templates that do not read it. Higher efforts are not bounded."""
_NO_TOOLS = ToolChoice((), False)


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning in the answer of a request.

    inside: the prompt has opened it. budget: its maximum tokens. can_bound: a grammar can separate it from the answer.
    """

    inside: bool
    budget: int | None
    can_bound: bool

    @property
    def bounded(self) -> bool:
        """Whether a grammar for the answer has to begin with the reasoning."""
        return self.can_bound and (self.inside or self.budget is not None)


def read_reasoning(
    service: Service, fields: Fields, encoder: ChatEncoder, prompt: str
) -> tuple[Reasoning, tuple[str, ...]]:
    """How the answer to a prompt may reason, and the names of budgets without effect. Raises RequestError."""
    budgets = {name: fields.get(name) for name in BUDGET_FIELDS if fields.get(name) is not None}
    if len(set(budgets.values())) > 1:
        raise RequestError(f"{' and '.join(budgets)} differ: send one of them.", param=next(iter(budgets)))
    budget = next(iter(budgets.values()), None)
    if budget is None and not encoder.template.names & {"reasoning_effort", "enable_thinking"}:
        budget = EFFORT_BUDGETS.get(fields.get("reasoning_effort"))
    tags = encoder.tags
    if tags is None:
        return Reasoning(False, None, False), tuple(budgets)
    inside = starts_inside(tags, prompt)
    if not can_bound(tags, service.tokenizer):
        return Reasoning(inside, None, False), tuple(budgets)
    return Reasoning(inside, budget, True), ()


async def constrain(
    service: Service,
    fields: Fields,
    sampling: SamplingParams,
    encoder: ChatEncoder,
    tools: ToolChoice | None,
    reasoning: Reasoning,
) -> SamplingParams:
    """Sampling with the grammar of the whole output. Raises BadGrammar or UnsupportedField naming the field."""
    if tools is not None:
        sampling = await _bind_tools(service, fields, sampling, encoder, tools, reasoning)
    else:
        await check_grammar(service, sampling, grammar_field(fields))
    tags, grammar = encoder.tags, sampling.grammar
    if tags is None or (grammar is None and reasoning.budget is None):
        return sampling
    if tags.channels and reasoning.can_bound:
        answer = grammar if tools is None else None
        grammar = harmony_grammar(tools or _NO_TOOLS, service.tokenizer, answer=answer, budget=reasoning.budget)
    elif reasoning.bounded:
        grammar = bound_reasoning(grammar, tags, service.tokenizer, inside=reasoning.inside, budget=reasoning.budget)
    else:
        return sampling
    sampling = dataclasses.replace(sampling, grammar=grammar)
    given = (name for name in BUDGET_FIELDS if fields.get(name) is not None)
    await check_grammar(service, sampling, next(given, grammar_field(fields) or "tools"))
    return sampling


async def _bind_tools(
    service: Service,
    fields: Fields,
    sampling: SamplingParams,
    encoder: ChatEncoder,
    tools: ToolChoice,
    reasoning: Reasoning,
) -> SamplingParams:
    """Sampling with the grammar that makes calls valid.

    Raises BadGrammar naming the function whose schema cannot be enforced.
    """
    tool_format = encoder.tool_format
    if tool_format is None:
        raise UnsupportedField(
            "tools is not supported: the server does not know the format of this model's tool calls. Leave tools out, or start "
            "the server with --tool-call-parser.",
            param="tools",
        )
    if sampling.grammar is not None:
        name = grammar_field(fields)
        raise UnsupportedField(
            f'{name} cannot be combined with tools: send one of them, or set tool_choice to "none".', param=name
        )
    parallel = fields.get("parallel_tool_calls", True)
    tags = TextTags.of(encoder.tags, bounded=reasoning.bounded)
    grammar = tool_grammar(tool_format, tools, service.tokenizer, parallel=parallel, tags=tags)
    constrained = dataclasses.replace(sampling, grammar=grammar)
    try:
        await check_grammar(service, constrained, "tools")
    except BadGrammar:
        if len(grammar.source) > MAX_SOURCE:
            raise
        for tool in tools.tools:
            single_tool = tool_grammar(tool_format, ToolChoice((tool,), True), service.tokenizer)
            try:
                await check_grammar(service, dataclasses.replace(sampling, grammar=single_tool), "tools")
            except BadGrammar as error:
                reason = f"tools: the parameters of {tool.name!r} cannot be enforced. {error.message}"
                raise BadGrammar(reason, param="tools") from None
        raise
    return constrained
