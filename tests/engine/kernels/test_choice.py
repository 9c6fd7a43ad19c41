"""What was measured once is remembered; without a GPU the file and its keys, with one the measuring too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.kernels.cases import DEVICE, normal

pytest.importorskip("triton", reason="a CPU-only torch comes without Triton")

from engine.kernels import choice
from engine.kernels.choice import Book, bucket, key_of
from engine.kernels.linear import Library, Product, Stream, Vector
from engine.kernels.triton_ops import TritonOps


def product(out: int = 64, inner: int = 32, eps: float | None = None, gated: bool = False) -> Product:
    return Product(torch.zeros(out, inner, dtype=torch.bfloat16), None, eps, gated)


def test_a_book_remembers_every_kind(tmp_path: Path) -> None:
    book = Book(tmp_path / "deep" / "linear.json")
    book.choices = {"a": Library(), "b": Stream(16, 32, 128, 2, 4, 5, swap=True), "c": Vector(8, 512)}
    book.save()
    other = Book(book.path, {"d": Library()})
    other.save()
    assert other.choices == book.choices | {"d": Library()}
    assert [path.name for path in book.path.parent.iterdir()] == ["linear.json"]


def test_a_book_that_is_no_book_is_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    path.write_text('{"a": {"kind": "stream", "rows": "many"}}')
    book = Book(path, {"b": Library()})
    book.save()
    assert book.choices == {"b": Library()}


def test_books_are_kept_where_the_user_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choice.cache_folder() == tmp_path / "dflash-tuner"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert choice.cache_folder() == Path.home() / ".cache" / "dflash-tuner"


def test_a_key_names_what_the_choice_depends_on() -> None:
    assert key_of(product(), 16) == "16x32x64 bfloat16"
    assert key_of(product(eps=1e-6, gated=True), bucket(1)) == "1x32x64 bfloat16 norm gated"
    assert len({key_of(product(out=out, eps=eps), 1) for out in (64, 96) for eps in (None, 1e-6)}) == 4


def test_known_choices_are_taken_without_measuring(tmp_path: Path) -> None:
    layers = [choice.TritonLinear(product()) for _ in range(2)]
    book = Book(tmp_path / "linear.json", {key_of(product(), 16): Stream(16, 16, 32)})
    choice.choose(layers, [3, 16], book)
    assert all(layer.plans == {16: Stream(16, 16, 32)} for layer in layers)
    assert not book.path.exists()


def test_a_book_that_cannot_be_kept_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    layer = choice.TritonLinear(Product(torch.zeros(64, 32), None, None, gated=False))  # float32: nothing to measure
    choice.choose([layer], [1], Book(tmp_path / "file" / "linear.json"))
    assert layer.plans == {1: Library()}
    assert '"event": "kernels_not_kept"' in capsys.readouterr().err


@pytest.mark.skipif(DEVICE.type != "cuda", reason="measuring needs a GPU")
def test_a_choice_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    norm = normal(256, dtype=torch.bfloat16)

    def prepared() -> list[choice.Plan]:
        ops = TritonOps(DEVICE)
        layers = [ops.linear(normal(256, 256, dtype=torch.bfloat16)) for _ in range(3)]
        layers += [ops.gated(norm, 1e-6, normal(1024, 256, dtype=torch.bfloat16))]
        ops.prepare([1, 9])
        assert all(set(layer.plans) == {1, 16} for layer in layers)
        return [layer.plans[size] for layer in layers for size in (1, 16)]

    first = prepared()
    monkeypatch.setattr(choice, "time_plans", lambda *_: pytest.fail("measured twice"))
    assert prepared() == first
