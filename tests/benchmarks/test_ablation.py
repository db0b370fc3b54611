"""The ablation switches kernels off, measures, and restores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ablation
import gpu
import pytest
import shapes
import torch
from ablation_table import ENGINE, VARIANTS, Asked, Switch, Variant

from ridgeline.core.spec import NUMBER_FORMATS
from ridgeline.ops.triton import attention, kernels
from ridgeline.ops.triton.attention_launch import AttentionShape
from ridgeline.ops.triton.norm import rms_norm
from ridgeline.ops.triton.products import ProductShape
from tests.benchmarks.test_shapes import SMALL, small

TINY, BF16 = "qwen3-4b", torch.bfloat16
SHORT = ["--device", "cpu", "--layers", "2", "--sizing", "prefill:24"]


def held(switch: Switch) -> Any:
    """The switched object as stored, so a property is not evaluated."""
    target, name = switch.place()
    return vars(target)[name]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_switches_exist_and_are_restored(variant: Variant) -> None:
    before = [held(switch) for switch in variant.switches]
    assert before
    with variant.off():
        assert all(held(switch) is not old for switch, old in zip(variant.switches, before, strict=True))
    assert all(held(switch) is old for switch, old in zip(variant.switches, before, strict=True))
    with pytest.raises(ZeroDivisionError), variant.off():
        raise ZeroDivisionError
    assert all(held(switch) is old for switch, old in zip(variant.switches, before, strict=True))


def test_a_switch_that_names_nothing_fails() -> None:
    variant = Variant("none", (), (Switch("table:no_such_kernel", lambda original: None),), ())
    with pytest.raises(AttributeError, match="no_such_kernel"), variant.off():
        pass


def test_rows_exist_and_names_are_unique() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    for variant in VARIANTS:
        # The logits of both sides are compared in steps alone.
        assert any(not asked.source.startswith(ENGINE) for asked in variant.rows), variant.name
        for asked in variant.rows:
            name, _, quantization = asked.source.removeprefix(ENGINE).partition(":")
            assert quantization in ablation.TOLERANCE and (not quantization or quantization in NUMBER_FORMATS)
            if asked.source.startswith(ENGINE):
                assert asked.row in {row.name for row in gpu.TABLE[name, quantization]}
            else:
                assert name in shapes.MODELS and shapes.case_of(asked.row).tokens


def shape(tokens: int, n: int, k: int, dtype: torch.dtype = BF16, **more: Any) -> ProductShape:
    return ProductShape(tokens, n, k, dtype, BF16, torch.device("cuda"), aligned=True, **more)


def test_the_next_best_path_is_taken(hopper: None) -> None:
    """What the registries say of shapes of an 8B, and what they say while a kernel is off."""
    of = {variant.name: variant for variant in VARIANTS}

    def chosen(*given: int, **more: Any) -> str | None:
        entry = kernels.PLAIN.kernel_for(shape(*given, **more))
        return None if entry is None else entry[0]

    eight = shape(16, 6144, 4096, torch.float8_e4m3fn)
    assert (chosen(96, 28_672, 4096, kind="silu"), chosen(16, 6144, 4096)) == ("wide (gates)", "ring")
    assert [kernels.FP8.kernel_for(eight)[0], chosen(1, 6144, 1024, norm=True)] == ["ring", "resident"]
    with of["wide"].off(), of["ring"].off(), of["ring of 8 bits"].off():
        assert chosen(96, 28_672, 4096, kind="silu") != "wide (gates)" and chosen(16, 6144, 4096) is None
        assert kernels.FP8.kernel_for(eight)[0] == "small"
    with of["gemv with the norm inside"].off():
        assert chosen(1, 6144, 1024, norm=True) is None and chosen(1, 6144, 1024) == "vector"
    with of["wide"].off():
        assert chosen(128, 28_672, 4096, kind="silu") == "matrix"
        with of["gemm_small (matrix tiles)"].off():
            assert chosen(128, 28_672, 4096, kind="silu") is None and chosen(1, 128_256, 4096) == "vector"
    with of["gemv (one token)"].off():
        assert chosen(64, 128_256, 4096) == "ring" and chosen(1, 128_256, 4096) is None
    assert chosen(128, 128_256, 4096) is None, "cuBLAS is faster"
    assert chosen(16, 6144, 4096) == "ring"


def test_integer_products_without_the_ring(hopper: None) -> None:
    """int4 of an 8B's qkv: through the ring, widened as a whole, and streamed."""
    of = {variant.name: variant for variant in VARIANTS}

    def chosen() -> list[str | None]:
        shapes = (shape(tokens, 6144, 4096, bits=4, group=128) for tokens in (1, 16, 64, 200, 512))
        entries = (kernels.INTEGER.kernel_for(shape) for shape in shapes)
        return [None if entry is None else entry[0].removeprefix("integer_") for entry in entries]

    assert chosen() == ["stream", "stream", "ring", "ring", "ring"]
    with of["integer_ring"].off():
        assert chosen() == ["stream", "stream", None, None, None]
    with of["integer_ring (streams to 256 tokens)"].off():
        assert chosen() == ["stream", "stream", "stream", "stream", None]
    with of["integer_stream"].off():
        assert chosen() == ["vector", "ring", "ring", "ring", "ring"]


def test_the_next_best_form_of_attention_is_taken() -> None:
    """Rows of a 9B of Gemma (8 KV heads of 256) and of an 8B (8 of 128) that decode on 132 processors."""
    of, device = {variant.name: variant for variant in VARIANTS}, torch.device("cuda")

    def split(rows: int, dim: int, long: bool = False) -> tuple[str, Any]:
        given = AttentionShape(rows, 1, long, 16, 8, dim, 64, BF16, BF16, device, 132)
        entry = attention.SPLIT.kernel_for(given)
        assert entry is not None
        return entry

    assert [split(8, 256)[0], split(2, 128, True)[0], split(64, 128)[0]] == ["wide", "lone", "snug"]
    assert split(64, 128)[1].ahead and split(64, 128)[1].registers
    with of["walk: wide"].off(), of["walk: lone"].off(), of["walk: snug"].off():
        assert [split(8, 256)[0], split(2, 128, True)[0], split(64, 128)[0]] == ["combined", "combined", "whole"]
    with of["walk: a kernel that combines"].off():
        assert [split(8, 256)[0], split(2, 128, True)[0], split(64, 128)[0]] == ["whole", "whole", "snug"]
    with of["walk: early"].off():
        assert not split(64, 128)[1].ahead and split(64, 128)[1].registers is None and split(8, 256)[1].ahead


def test_launches_are_counted_by_kernel_and_form() -> None:
    launches, x = ablation.Launches(), torch.randn(3, 64)
    rms_norm(x, torch.ones(64), 1e-6, False)
    with launches.counted():
        rms_norm(x, torch.ones(64), 1e-6, False)
        few = set(launches.forms)
        rms_norm(x[:2], torch.ones(64), 1e-6, False)
    rms_norm(x, torch.ones(64), 1e-6, False)
    assert launches.kernels == {"norm._norm_kernel": 2}
    assert few < launches.forms
    assert launches.of(Variant("norm", ("norm._norm_kernel",), (), ())) == 2


def test_a_kernel_is_off_if_it_is_launched_no_more() -> None:
    def launches(**kernels: int) -> ablation.Launches:
        counted = ablation.Launches()
        counted.kernels.update(kernels)
        counted.forms.update((name,) for name in kernels)
        return counted

    alone, shared, form = (
        Variant("alone", ("ring",), (), ()),
        Variant("shared", ("ring",), (), (), True),
        Variant("form", (), (), ()),
    )
    assert ablation.is_off(alone, launches(ring=4), launches(other=4))
    assert not ablation.is_off(alone, launches(ring=4), launches(ring=1))
    assert not ablation.is_off(alone, launches(other=4), launches(other=4))
    assert ablation.is_off(shared, launches(ring=4), launches(ring=1))
    assert not ablation.is_off(shared, launches(ring=4), launches(ring=4))
    assert ablation.is_off(form, launches(ring=4), launches(other=4))
    assert not ablation.is_off(form, launches(ring=4), launches(ring=4))


def test_a_gain_is_positive_where_the_kernel_is_faster() -> None:
    assert ablation.Reading({True: [10.0], False: [11.0]}, "us").gains == pytest.approx([0.1])
    assert ablation.Reading({True: [11.0], False: [10.0]}, "tok/s").gains == pytest.approx([0.1])


def variant_of(change: Any, source: str, row: str) -> Variant:
    """A variant that changes what a decoder's forward pass says, which works on a CPU too."""
    switch = Switch("decoder:Decoder.forward", change, package="ridgeline.models")
    return Variant("tiny", (), (switch,), (Asked(source, row, 1.0),))


def test_steps_are_read_in_turns_and_compared(tmp_path: Path) -> None:
    """Through the whole script on a CPU: a switch that changes nothing, and one that changes the logits."""
    source = str(small(tmp_path / "tiny", TINY))
    sides: list[str] = []

    def change(sign: int, name: str) -> Any:
        def replace(original: Any) -> Any:
            def forward(*given: Any) -> Any:
                sides.append(name)
                return sign * original(*given)

            return forward

        return replace

    out = tmp_path / "new" / "ablation.json"
    for sign, row in ((1, "decode:3x20"), (-1, "prefill:24")):
        words = [*SHORT, "--turns", "3", "--repeats", "2", "--out", str(out)]
        ablation.main(words, [variant_of(change(sign, row), source, row)])
    same, negative = json.loads(out.read_text())
    assert [row["row"] for row in (same, negative)] == [f"tiny: {source}-decode:3x20", f"tiny: {source}-prefill:24"]
    assert same["agree"] and same["logits_differ"] == 0 and same["same_tokens"] == 1 and same["predicted"] == 0.01
    assert not negative["agree"] and negative["logits_differ"] == pytest.approx(2)
    assert same["gain_low"] <= same["gain"] <= same["gain_high"] and same["turns"] == 3 and same["unit"] == "us"
    assert not same["off"]  # no Triton kernel ran at all, so none ran in another form
    assert {"machine", "date", "commit", "command"} < set(same)
    # Four readings (the first is dropped) of three warm-up and two timed steps, and one step for the logits.
    assert sides.count("decode:3x20") == 4 * 5 + 1


def test_rows_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shapes.MODELS[TINY] | SMALL | {"num_hidden_layers": 2}))
    row = gpu.Row("tiny-tpot-ms", "ms", None, None, None, lambda bench: bench.seconds([(8, 4)]) * 1e3)
    runs: list[int] = []

    def replace(original: Any) -> Any:
        return lambda *given: runs.append(1) or original(*given)

    variant = variant_of(replace, f"{ENGINE}{tmp_path}", "tiny-tpot-ms")
    rows: list[dict[str, Any]] = []
    ablation.run(ablation.parse(["--turns", "2"], [variant]), rows, {(str(tmp_path), ""): [row]})
    assert [row["of"] for row in rows] == ["tiny-tpot-ms"] and rows[0]["unit"] == "ms" and rows[0]["agree"] is None
    assert len(runs) >= 3  # a warm-up run and two turns; recorded CPU steps repeat without Python
    (line,) = ablation.summary(rows)
    assert line.startswith("tiny") and line.endswith("not measured; 1 rows at fault")
    (line,) = ablation.summary([row | {"off": True, "gain": 0.03} for row in rows])
    assert "stays  best   +3.0 %" in line and line.endswith("on tiny-tpot-ms")
    (line,) = ablation.summary([row | {"off": True, "gain": 0.019} for row in rows])
    assert "goes   best   +1.9 %" in line
    assert "NOT SWITCHED OFF" in capsys.readouterr().out


def test_a_row_that_fails_is_written_and_the_next_is_measured(tmp_path: Path) -> None:
    source = str(small(tmp_path / "tiny", TINY))

    def fail(*given: Any) -> None:
        raise RuntimeError("no such kernel image")

    variants = (
        variant_of(lambda original: fail, source, "decode:2x20"),
        variant_of(lambda same: same, source, "prefill:24"),
    )
    out = tmp_path / "ablation.json"
    words = [*SHORT, "--turns", "1", "--repeats", "1", "--out", str(out)]
    rows: list[dict[str, Any]] = []
    ablation.run(ablation.parse(words, variants), rows)
    failed, good = rows
    assert failed["error"] == "RuntimeError: no such kernel image" and "with" not in failed
    assert ablation.remarks(failed) == "FAILED: RuntimeError: no such kernel image"
    assert good["agree"] and [row["of"] for row in json.loads(out.read_text())] == [failed["of"], good["of"]]


def test_no_row_is_begun_too_late() -> None:
    variant = variant_of(lambda original: original, TINY, "decode:3x20")
    rows: list[dict[str, Any]] = []
    ablation.run(ablation.parse(["--device", "cpu", "--seconds", "0"], [variant]), rows)
    assert not rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sources", "gpt-5"], "--sources: 'gpt-5' has no row"),
        (["--variants", "gated,geted"], "--variants: no variant begins with 'geted'; there are gated, "),
        (["--turns", "0"], "--turns and --repeats: give at least 1"),
    ],
)
def test_arguments_that_ask_for_nothing_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        ablation.parse(words)


def test_arguments() -> None:
    args = ablation.parse([])
    assert args.table == list(VARIANTS) and args.sources == ablation.sources_of(VARIANTS)
    args = ablation.parse(["--variants", "gated,gemv (", "--sources", "qwen3-1.7b,llama-3.1-8b"])
    assert [variant.name for variant in args.table] == ["gated", "gemv (one token)"]
    assert args.sources == ["qwen3-1.7b", "llama-3.1-8b"]
    engines = [name for name in ablation.sources_of(args.table) if name.startswith(ENGINE)]
    assert engines == [ENGINE + "llama-3.1-8b", ENGINE + "qwen3-0.6b"]
