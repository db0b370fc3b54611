"""Turn a training run into a Hugging Face folder and check that transformers computes the same logits with it.

python training/convert.py --run RUN --tokenizer tokenizer.json --out FOLDER

The shape is that of RUN/shape.json. Without this file it is the shipped model's (merge.py writes none). --unchecked is for machines
without transformers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from evaluate import load_model
from model import Shape
from safetensors.torch import load_file, save_file

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
END_OF_TEXT, TURN_END, PAD = "<|endoftext|>", "<|im_end|>", "<|pad|>"
TOLERANCE = 1e-4


def config(shape: Shape, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.hidden,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[END_OF_TEXT],
        "pad_token_id": ids[PAD],
        "torch_dtype": "bfloat16",
    }


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": [ids[END_OF_TEXT], ids[TURN_END]],
        "pad_token_id": ids[PAD],
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }


def tokenizer_config(added: list[dict[str, Any]], context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
        "chat_template": TEMPLATE.read_text(encoding="utf-8").rstrip("\n"),
    }


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def shape_of(run: Path) -> Shape:
    path = run / "shape.json"
    return Shape(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else Shape()


def convert(run: Path, tokenizer: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tokenizer, out / "tokenizer.json")
    added = json.loads(tokenizer.read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    named = {f"model.{name}": tensor for name, tensor in load_file(run / "model.safetensors").items()}
    save_file(named, out / "model.safetensors", metadata={"format": "pt"})
    shape = shape_of(run)
    write(out, "config.json", config(shape, ids))
    write(out, "generation_config.json", generation_config(ids))
    write(out, "tokenizer_config.json", tokenizer_config(added, shape.context))
    write(out, "special_tokens_map.json", {"bos_token": END_OF_TEXT, "eos_token": TURN_END, "pad_token": PAD})


def largest_difference(folder: Path) -> float:
    """Largest absolute difference of the logits of transformers and of the training model, in float32, over 1,024 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, tokenize=False
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(reference.config.vocab_size, (2, 1024), generator=generator)
    said = torch.tensor(tokenizer(chat)["input_ids"])
    ids[0, : len(said)] = said
    ours, _ = load_model(folder)
    with torch.no_grad():
        return float((reference(ids).logits - ours(ids)).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--unchecked", action="store_true", help="do not compare with transformers")
    arguments = parser.parse_args()
    convert(arguments.run, arguments.tokenizer, arguments.out)
    if arguments.unchecked:
        return
    difference = largest_difference(arguments.out)
    print(f"largest difference of logits: {difference:.2e}")
    if difference > TOLERANCE:
        raise SystemExit(f"the converted model differs from the trained one by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
