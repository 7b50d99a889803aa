"""The ONNX file does what the model does, from pixels to logits, for any number of images; or it is not written."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.photos import COLOURS, photo
from trainer import load_model, onnx_model
from trainer.to_onnx import main


def test_equal_logits(photos_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run by onnxruntime alone, on real images, one and many; the preprocessing is in it, and described."""
    import onnxruntime

    main([str(photos_run), "--output", "colours.onnx"])
    out, errors = capsys.readouterr()
    assert errors == ""
    assert out.startswith("colours.onnx: images uint8 (N, 3, 16, 16) -> logits (N, 3); largest difference of a logit ")
    assert [path.name for path in tmp_path.iterdir()] == ["colours.onnx"]
    session = onnxruntime.InferenceSession("colours.onnx", providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == list(COLOURS)
    assert (about["mode"], json.loads(about["size"])) == ("RGB", [16, 16])
    model, preprocess = load_model(photos_run)
    for count in (1, 9):
        pixels = torch.stack([preprocess.pixels(photo("rust", index)) for index in range(count)])
        with torch.no_grad():
            expected = model(preprocess.normalize(pixels))
        (logits,) = session.run(None, {"images": pixels.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)


def test_a_file_that_differs_is_not_written(
    photos_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was there stays, byte for byte."""
    (tmp_path / "model.onnx").write_bytes(b"before")
    write = onnx_model.write

    def write_another(module: nn.Module, *rest: Any) -> None:
        write(nn.Sequential(module, nn.Threshold(1e9, 77.0)), *rest)

    monkeypatch.setattr(onnx_model, "write", write_another)
    with pytest.raises(SystemExit) as end:
        main([str(photos_run), "--output", "model.onnx"])
    assert end.value.code == 1
    errors = capsys.readouterr().err
    assert re.match(
        r"error: the exported logits differ from the model's by up to [78]\.\de\+01, more than 0\.0001 of the largest, ", errors
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model.onnx": b"before"}


def test_mistakes(photos_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        ([], "the following arguments are required: MODEL: see --help"),
        (["gone"], "the model folder gone cannot be loaded: "),
        ([str(photos_run), "--output", "gone/x.onnx"], "--output gone/x.onnx is a folder, or its folder is not there: name a file"),
        ([str(photos_run), "--opset", "3"], "unknown flag --opset"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        out, errors = capsys.readouterr()
        assert (end.value.code, out) == (2, "")
        assert errors.startswith(f"error: {sentence}")
        assert errors.count("\n") == 1
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SystemExit):
        main([str(photos_run), "--output", "x.onnx"])
    assert capsys.readouterr().err.startswith("error: to_onnx needs onnx, onnxscript and onnxruntime (import of onnxruntime")
