"""Checks libraries on the device: some steps of each, in plain torch and offloaded, must give the same losses."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import swapper
from gpu.bench import Bench, Row, each
from gpu.training import device_of

STEPS = 4
LIBRARIES = {
    "transformers' Trainer": ("transformers", "accelerate"),
    "TRL's SFTTrainer": ("trl", "datasets"),
    "PEFT, in the Trainer": ("peft", "transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "Lightning": ("lightning",),
}
VOCABULARY, WIDTH, LENGTH = 512, 128, 16


def figure_of(name: str) -> str:
    return f"{name}, {STEPS} steps, losses equal"


class Lines(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def data() -> torch.Tensor:
    return torch.randn(2 * STEPS, WIDTH, generator=torch.Generator().manual_seed(3))


def words() -> Any:
    """Return a tokenizer of as many words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    known = {"<unk>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", pad_token="</s>")


def options_of(bench: Bench) -> dict[str, Any]:
    return {"device": device_of(bench), "params": "nvme", "optimizer_state": "nvme"}


def by_trainer(bench: Bench, place: Path, is_ours: bool, make: Callable[[], Any] = llama) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**_arguments(bench, place))
    return _logged(_class_of(Trainer, bench, place, is_ours)(make(), arguments, train_dataset=Lines()), is_ours)


def by_peft(bench: Bench, place: Path, is_ours: bool) -> list[float]:
    def adapted() -> Any:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    return by_trainer(bench, place, is_ours, adapted)


def by_trl(bench: Bench, place: Path, is_ours: bool) -> list[float]:
    from datasets import Dataset as Table
    from trl import SFTConfig, SFTTrainer

    lines = Lines()
    table = Table.from_list([{"input_ids": lines[n]["input_ids"].tolist()} for n in range(len(lines))])
    arguments = SFTConfig(**_arguments(bench, place), dataset_kwargs={"skip_prepare_dataset": True})
    made = _class_of(SFTTrainer, bench, place, is_ours)
    return _logged(made(llama(), args=arguments, train_dataset=table, processing_class=words()), is_ours)


def _arguments(bench: Bench, place: Path) -> dict[str, Any]:
    return {
        "output_dir": str(place / "out"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": bench.on_cpu,
        "disable_tqdm": True,
    }


def _class_of(trainer: type, bench: Bench, place: Path, is_ours: bool) -> Any:
    from swapper.integrations.transformers import offloaded

    return offloaded(trainer, swapper.SwapManager(place, "64MiB"), **options_of(bench)) if is_ours else trainer


def _logged(trainer: Any, is_ours: bool) -> list[float]:
    trainer.train()
    if is_ours:
        trainer.manager.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_accelerate(bench: Bench, place: Path, is_ours: bool) -> list[float]:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=bench.on_cpu), layers()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = swapper.SwapManager(place, "16MiB") if is_ours else None
    if manager is not None:
        _, optimizer = manager.offload(model, optimizer, **options_of(bench))
    used, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for batch in data().to(bench.device).split(2):
        loss = used(batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(used.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if manager is not None:
        manager.close()
    return losses


def by_lightning(bench: Bench, place: Path, is_ours: bool) -> list[float]:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = layers(), list[float]()
            self.manager = swapper.SwapManager(place, "16MiB") if is_ours else None

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer: Any = torch.optim.AdamW(self.parameters(), lr=1e-3)
            if self.manager is not None:
                _, optimizer = self.manager.offload(self.net, optimizer, **options_of(bench))
            return optimizer

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu" if bench.on_cpu else "gpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=2))
    if module.manager is not None:
        module.manager.close()
    return module.losses


RUNS: dict[str, Callable[[Bench, Path, bool], list[float]]] = {
    "transformers' Trainer": by_trainer,
    "TRL's SFTTrainer": by_trl,
    "PEFT, in the Trainer": by_peft,
    "accelerate": by_accelerate,
    "Lightning": by_lightning,
}


def libraries(bench: Bench) -> Iterator[Row]:
    def row(name: str) -> Iterator[Row]:
        lacking = [module for module in LIBRARIES[name] if importlib.util.find_spec(module) is None]
        if lacking:
            yield Row(figure_of(name), reason=f"{', '.join(lacking)} is not installed", is_open=True)
            return
        with tempfile.TemporaryDirectory(dir=bench.directory) as place:
            plain, ours = (RUNS[name](bench, Path(place) / str(is_ours), is_ours) for is_ours in (False, True))
        told = "equal" if ours == plain else f"{ours}, plain {plain}"
        is_equal = ours == plain and len(plain) == STEPS
        yield Row(figure_of(name), "equal", told, is_equal, is_equal=is_equal)

    yield from each(*(((figure_of(name),), partial(row, name)) for name in RUNS))
