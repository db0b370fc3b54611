"""llama.cpp's side of cpu_peers.py, in an environment of its own with llama-cpp-python and without Ridgeline.

`python llama_peer.py FILE.gguf THREADS FLASH` loads the model and prints a line of JSON with the version. It answers each line of
standard input, a JSON list [prompt token ids, output tokens], with a line {"first": s, "rest": s, "tokens": [...]}. first: from the
prompt to its greedy token; rest: from there to the last token. It calls llama.cpp's C interface, so Python adds an argmax and a
few calls for each token.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp
import numpy as np

CONTEXT = 1024


class Model:
    def __init__(self, path: str, threads: int, *, flash: bool) -> None:
        self._llama = llama_cpp.Llama(
            path, n_ctx=CONTEXT, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, flash_attn=flash,
            use_mmap=True, verbose=False,
        )  # fmt: skip
        self._context = self._llama.ctx
        self._vocabulary = self._llama.n_vocab()

    def _next(self, tokens: list[int]) -> int:
        """The greedy token behind `tokens`, which follow what the cache holds."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, (self._vocabulary,)).argmax())

    def run(self, prompt: list[int], outputs: int) -> dict[str, object]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        started = time.perf_counter()
        tokens = [self._next(prompt)]
        first = time.perf_counter()
        while len(tokens) < outputs:
            tokens.append(self._next(tokens[-1:]))
        return {"first": first - started, "rest": time.perf_counter() - first, "tokens": tokens}


def main() -> None:
    path, threads, flash = sys.argv[1:]
    model = Model(path, int(threads), flash=flash == "1")
    system = llama_cpp.llama_print_system_info().decode().strip()
    print(json.dumps({"version": llama_cpp.__version__, "system": system}), flush=True)
    for line in sys.stdin:
        prompt, outputs = json.loads(line)
        print(json.dumps(model.run(prompt, outputs)), flush=True)


if __name__ == "__main__":
    main()
