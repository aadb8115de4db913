"""axolotl trains by its own command with SwapperPlugin as it does without, and goes on where it was killed."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path

import pytest

from e2e.processes import killed_at_step, run_python
from e2e.test_trainer import write_model_with_words
from e2e.trainer_run import write_model

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("axolotl") is None, reason="axolotl is in no extra: its versions are its own"
    ),
]
BASE = {
    "base_model": "./model", "datasets": [{"path": "./lines.jsonl", "ds_type": "json", "type": "completion"}],
    "dataset_prepared_path": "./prepared", "sequence_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
    "max_steps": 5, "learning_rate": 1e-3, "optimizer": "adamw_torch", "lr_scheduler": "cosine", "bf16": False, "fp16": False,
    "save_strategy": "no", "logging_steps": 1, "val_set_size": 0, "attn_implementation": "sdpa",
}  # fmt: skip
PLUGIN = {
    "plugins": ["swapper.integrations.axolotl.SwapperPlugin"],
    "swapper_run": "./run",
    "swapper_options": {"params": "nvme", "optimizer_state": "nvme"},
}
KILLED = killed_at_step(2, "from axolotl.cli.train import do_cli\ndo_cli(sys.argv[1])")
OFFLINE = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


def test_three_lines_of_configuration_train_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model_with_words(write_model(tmp_path / "model"))
    words = ["the", "red", "blue", "old", "fox", "jumps"]
    lines = [
        {"text": " ".join(words[(first + step * second) % 6] for step in range(8))}
        for first in range(6)
        for second in (1, 5)
    ]
    Path("lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, more in (("plain", {}), ("ours", PLUGIN)):
        Path(f"{name}.yml").write_text(json.dumps({**BASE, **more, "output_dir": f"./{name}"}))  # JSON is YAML
    done = run_python("-m", "axolotl.cli.train", "plain.yml", **OFFLINE)
    assert done.returncode == 0, done.stderr[-4000:]
    Path("killed.py").write_text(KILLED)
    done = run_python("killed.py", "ours.yml", **OFFLINE)
    assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]
    done = run_python("-m", "axolotl.cli.train", "ours.yml", **OFFLINE)
    assert done.returncode == 0, done.stderr[-4000:]
    written = "model.safetensors"
    before = Path("model", written).read_bytes()
    assert before != Path("plain", written).read_bytes() == Path("ours", written).read_bytes()
