"""Checks grammars by compiling each in a process of its own.

The library's limits do not bound its work for some schemas (patterns that `allOf` intersects, large `multipleOf`): 24 patterns
in 1.5 kB took 4 GB and did not end. A thread cannot be stopped, but a process can. One process reads the vocabulary once and
forks a child for each grammar. The system ends a child that exceeds its limits, and the next child starts at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ridgeline.core.errors import BadGrammar, EngineFailed, UnsupportedField
from ridgeline.core.sampling import Grammar
from ridgeline.text.grammar import MAX_SOURCE, GrammarCompiler
from ridgeline.text.grammar_cache import NICENESS
from ridgeline.text.grammar_errors import NOUNS, too_large
from ridgeline.text.tokenizer import Tokenizer

CPU_S = 1.0
"""CPU seconds that one grammar may take. Large ordinary grammars take 0.2."""
MEMORY = 256 << 20
"""Bytes that one grammar may take."""

_PR_SET_PDEATHSIG = 1
"""prctl(2): sets the signal that a process gets when its parent ends."""
_WALL_S = 60
"""Seconds after which a child ends even if it did not use up its CPU time."""


class GrammarWorker:
    """The checking process. It starts with the first grammar. Only one thread at a time may call `judge`."""

    def __init__(self, folder: Path, *, vocab_size: int, end_ids: Sequence[int]) -> None:
        """folder: the model folder, with its tokenizer. vocab_size, end_ids: as in GrammarCompiler."""
        self._command = [sys.executable, "-m", __name__, str(folder), str(vocab_size), *map(str, end_ids)]
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def judge(self, grammar: Grammar) -> str:
        """Why the grammar is refused; "" if it is accepted.

        Raises UnsupportedField without llguidance, EngineFailed when the process cannot start, was killed or was closed.
        """
        if len(grammar.source) > MAX_SOURCE:
            noun = NOUNS[grammar.kind]
            return f"The {noun} has {len(grammar.source)} characters, more than {MAX_SOURCE}: shorten it."
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([grammar.kind, grammar.source]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            self._end()
            if self._closed:
                raise EngineFailed("The server is shutting down: send the request to another replica.")
            raise EngineFailed("The process that compiles grammars was killed: send the request again.")
        kind, message = json.loads(answer)
        if kind == "unsupported":
            raise UnsupportedField(message)
        return str(message)

    def close(self) -> None:
        """End the process. Callers that wait for a verdict get an error. May be called from another thread."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _start(self) -> subprocess.Popen[str]:
        if self._closed:
            raise EngineFailed("The server is shutting down: send the request to another replica.")
        if self._process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(self._command, text=True, **pipes)  # type: ignore[call-overload]
            assert self._process is not None and self._process.stdout is not None
            if not self._process.stdout.readline():
                self._end()
                raise EngineFailed("The process that compiles grammars cannot start.")
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def main(folder: str, vocab_size: str, *end_ids: str) -> None:
    """Read grammars from standard input, one a line, and write a verdict for each, until the input ends."""
    _end_with_the_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service
    os.nice(NICENESS)
    compiler = GrammarCompiler(Tokenizer.load(folder), vocab_size=int(vocab_size), end_ids=list(map(int, end_ids)))
    _answer(compiler, Grammar("regex", "a"))  # reads the vocabulary
    print("ready", flush=True)
    for line in sys.stdin:
        print(_answer_in_child(compiler, Grammar(*json.loads(line))), flush=True)


def _answer_in_child(compiler: GrammarCompiler, grammar: Grammar) -> str:
    """The verdict on a grammar as a line of JSON. A child that ends without one was killed because it exceeded its limits."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _end_with_the_parent()
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
            signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
            signal.alarm(_WALL_S)
            os.write(writer, json.dumps(_answer(compiler, grammar)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer or json.dumps(("verdict", too_large(grammar)))


def _end_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(compiler: GrammarCompiler, grammar: Grammar) -> tuple[str, str]:
    try:
        compiler.compile(grammar)
    except UnsupportedField as error:
        return "unsupported", error.message
    except BadGrammar as error:
        return "verdict", error.message
    except MemoryError:
        return "verdict", too_large(grammar)
    return "verdict", ""


if __name__ == "__main__":
    main(*sys.argv[1:])
