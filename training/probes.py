"""Ask a converted model the fixed questions of probes.jsonl, greedily, and score the answers by exact rules.

    python training/probes.py --model FOLDER --out probes.json

"contains": one of the strings stands in the answer. "last": the last number of the answer is this one. "python": the answer is one
fenced block that Python parses, with a function that returns something. "call": the answer is this tool call, name and arguments
alike. An answer of LENGTH tokens that has not ended fails in every group but "docs".
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from samples import write
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = Path(__file__).with_name("probes.jsonl")
LENGTH = 192


def schema(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": value} for key, value in parameters.items()}
    shape = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shape}}


def messages(probe: dict[str, Any]) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": probe["system"]}] if "system" in probe else []
    for asked, answered in probe.get("before", []):
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*turns, {"role": "user", "content": probe["ask"]}]


def returns(answer: str) -> bool:
    """Whether the answer is a fenced block of Python with a function that returns a value."""
    match = re.fullmatch(r"```python\n(.*)\n```", answer.strip(), re.DOTALL)
    try:
        nodes = list(ast.walk(ast.parse(match[1]))) if match else []
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Return) and node.value for node in nodes)


def called(answer: str) -> Any:
    match = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", answer.strip(), re.DOTALL)
    try:
        return json.loads(match[1]) if match else None
    except ValueError:
        return None


def right(probe: dict[str, Any], answer: str) -> bool:
    if "call" in probe:
        return bool(called(answer) == probe["call"])
    if "python" in probe:
        return returns(answer)
    if "last" in probe:
        return bool(re.findall(r"\d+", answer)[-1:] == [probe["last"]])
    return any(part in answer for part in probe["contains"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    asked: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    answers = []
    for probe in map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines()):
        tools = [schema(*tool) for tool in probe.get("tools", [])] or None
        prompt = tokenizer.apply_chat_template(messages(probe), tools=tools, add_generation_prompt=True, tokenize=False)
        ids = write(model, [tokenizer(prompt)["input_ids"]], LENGTH, do_sample=False, temperature=None, top_p=None)[0]
        answer = tokenizer.decode(ids)
        good = right(probe, answer) and (len(ids) < LENGTH or probe["group"] == "docs")
        asked[probe["group"]] += 1
        passed[probe["group"]] += good
        answers.append({"group": probe["group"], "ask": probe["ask"], "answer": answer, "right": good})
    groups = {group: {"asked": asked[group], "right": passed[group]} for group in asked}
    print(sum(passed.values()), "of", sum(asked.values()), groups)
    content = {"groups": groups, "answers": answers}
    arguments.out.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
