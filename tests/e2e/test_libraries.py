"""Other people's loops over an offloaded model and optimizer: transformers' Trainer, accelerate, averaged models. What they compute
and keep is what it is with plain torch."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import swapper
from e2e import libraries_run
from e2e.processes import run_python

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
LIGHTNING_RUN = Path(__file__).with_name("lightning_run.py")
NVME = {"params": "nvme", "optimizer_state": "nvme"}


class Lines(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 512, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama(lora: bool) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters)


def train(
    directory: Path, placement: dict[str, Any] | None, lora: bool, resume: Path | None = None, **options: Any
) -> tuple[list[float], Path]:
    """Return the losses, and the checkpoint that the Trainer wrote in the middle."""
    directory.mkdir()
    model = llama(lora)
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    manager = None
    if placement is not None:
        manager = swapper.SwapManager(directory, "16MiB")
        model, optimizer = manager.offload(model, optimizer, **placement)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    arguments = TrainingArguments(
        output_dir=str(directory / "out"), per_device_train_batch_size=2, max_steps=6, logging_steps=1, save_steps=3,
        report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Lines(), optimizers=(optimizer, schedule))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if manager is not None:
        manager.close()
    return losses, directory / "out" / "checkpoint-3"


@pytest.mark.parametrize(
    ("placement", "lora", "options"),
    [
        (NVME, False, {"gradient_accumulation_steps": 2}),
        ({**NVME, "update": "deferred"}, False, {"gradient_checkpointing": True}),
        ({**NVME, "gradients": "nvme"}, False, {"bf16": True}),
        ({**NVME, "update": "backward"}, False, {"max_grad_norm": 1e9}),  # the norm is logged, and nothing clipped
        (NVME, True, {}),
    ],
    ids=["accumulation", "deferred, checkpointing", "gradients on NVMe, autocast", "backward", "lora"],
)
def test_losses_and_checkpoints_are_plain_torchs(
    tmp_path: Path, placement: dict[str, Any], lora: bool, options: dict[str, Any]
) -> None:
    plain, plain_checkpoint = train(tmp_path / "plain", None, lora, **options)
    ours, checkpoint = train(tmp_path / "ours", placement, lora, **options)
    assert ours == plain
    written = next(checkpoint.glob("*model.safetensors")).name
    assert (checkpoint / written).read_bytes() == (plain_checkpoint / written).read_bytes()
    for number, source in enumerate((plain_checkpoint, checkpoint)):
        resumed, _ = train(tmp_path / f"resumed {number}", placement, lora, source, **options)
        assert resumed == plain


def layers() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))


def offloaded(model: Any, optimizer: Any, manager: swapper.SwapManager | None) -> tuple[Any, Any]:
    return (model, optimizer) if manager is None else manager.offload(model, optimizer, **NVME)


def accelerated(manager: swapper.SwapManager | None, directory: Path) -> list[torch.Tensor]:
    """A loop by accelerate; its checkpoint is taken in the middle and gone back to once."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = layers()
    model, optimizer = offloaded(model, torch.optim.AdamW(model.parameters()), manager)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    losses = []
    for number in range(8):
        batch = torch.randn(4, 256, generator=torch.Generator().manual_seed(number))
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if number == 3:
            accelerator.save_state(str(directory))
        if number == 5:
            accelerator.load_state(str(directory))
    return [*losses, *(value.clone() for value in accelerator.get_state_dict(model).values())]


def averaged(manager: swapper.SwapManager | None, directory: Path) -> list[torch.Tensor]:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = layers()
    averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    model, optimizer = offloaded(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), manager)
    for number in range(5):
        batch = torch.randn(4, 256, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        for average in averages:
            average.update_parameters(model)
    return [value.clone() for average in averages for value in average.state_dict().values()]


@pytest.mark.parametrize("loop", [accelerated, averaged])
def test_a_loop_gives_what_it_gives_with_plain_torch(tmp_path: Path, loop: Any) -> None:
    plain = loop(None, tmp_path / "plain")
    (tmp_path / "run").mkdir()
    with swapper.SwapManager(tmp_path / "run", "8MiB") as manager:
        ours = loop(manager, tmp_path / "ours")
    assert len(ours) == len(plain) and all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def fit_by_lightning(directory: Path, swapped: bool, checkpoint: Path | None = None) -> tuple[list[torch.Tensor], Path]:
    """Return losses and parameters of a fit with clipping, accumulation and a schedule, and its checkpoint of step 2."""
    lightning = pytest.importorskip("lightning", reason="lightning is not installed: tools/setup test")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()
            self.losses: list[torch.Tensor] = []
            self.manager = (
                swapper.SwapManager(directory / "run", "16MiB") if swapped else None
            )  # Lightning keeps the class

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            self.losses.append(self.layers(batch).square().mean())
            return self.losses[-1]

        def configure_optimizers(self) -> Any:
            _, optimizer = offloaded(self, torch.optim.AdamW(self.parameters(), lr=1e-2), self.manager)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=directory, filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=0.1, callbacks=[saving],
        default_root_dir=directory, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    data = torch.randn(12, 256, generator=torch.Generator().manual_seed(3))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2), ckpt_path=checkpoint)
    result = [*map(torch.Tensor.detach, module.losses), *(value.clone() for value in module.state_dict().values())]
    if module.manager is not None:
        module.manager.close()
    return result, directory / "step=2.ckpt"


def test_lightning_trains_and_resumes_from_its_checkpoint_as_with_plain_torch(tmp_path: Path) -> None:
    plain, plain_checkpoint = fit_by_lightning(tmp_path / "plain", False)
    ours, checkpoint = fit_by_lightning(tmp_path / "ours", True)
    plain_resumed, _ = fit_by_lightning(tmp_path / "plain resumed", False, plain_checkpoint)
    resumed, _ = fit_by_lightning(tmp_path / "resumed", True, checkpoint)
    for one, other in ((ours, plain), (resumed, plain_resumed)):
        assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len(plain_resumed) == len(plain) - 4  # two steps of two batches are not taken again


def fit_on_ranks(directory: Path, result: str, *arguments: object) -> list[list[torch.Tensor]]:
    """Return what each rank of lightning_run.py got. Lightning starts them itself."""
    done = run_python(LIGHTNING_RUN, directory, result, *arguments)
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(directory / f"{result}.rank-{rank}.pt") for rank in range(2)]


def check_same(ours: list[list[torch.Tensor]], plain: list[list[torch.Tensor]]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("how", ["ours", "deferred"])
def test_lightnings_ddp_trains_and_resumes_from_its_checkpoint_as_without_swapper(tmp_path: Path, how: str) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: tools/setup test")
    plain = fit_on_ranks(tmp_path, "plain", "ddp", "plain")
    assert not torch.equal(plain[0][0], plain[1][0])  # each rank has batches of its own
    (tmp_path / "a").mkdir()
    check_same(fit_on_ranks(tmp_path / "a", "ours", "ddp", how), plain)
    plain_resumed = fit_on_ranks(tmp_path, "plain resumed", "ddp", "plain", tmp_path / "plain" / "step=2.ckpt")
    assert len(plain_resumed[0]) == len(plain[0]) - 4
    (tmp_path / "b").mkdir()
    check_same(
        fit_on_ranks(tmp_path / "b", "resumed", "ddp", how, tmp_path / "a" / "ours" / "step=2.ckpt"), plain_resumed
    )


def test_lightnings_model_parallel_strategy_trains_shards_as_without_swapper(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: tools/setup test")
    check_same(
        fit_on_ranks(tmp_path, "ours", "model_parallel", "ours"),
        fit_on_ranks(tmp_path, "plain", "model_parallel", "plain"),
    )


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("early", "make it after init_process_group (with Lightning: in configure_optimizers)"),
        (
            "backward",
            "DistributedDataParallel does not go with update='backward': gradients are averaged over processes",
        ),
    ],
)
def test_what_does_not_go_with_lightnings_ddp_is_refused_before_the_first_step(
    tmp_path: Path, how: str, text: str
) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: tools/setup test")
    done = run_python(LIGHTNING_RUN, tmp_path, "refused", "ddp", how)
    assert done.returncode != 0 and text in done.stderr, done.stderr[-6000:]
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("given", [False, True], ids=["model only", "with an optimizer"])
def test_a_trainer_that_makes_its_own_optimizer_is_refused_at_its_first_step(tmp_path: Path, given: bool) -> None:
    model = llama(lora=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if given else None
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )  # fmt: skip
    with swapper.SwapManager(tmp_path, "16MiB") as manager:
        manager.offload(model, optimizer, params="host")
        trainer = Trainer(model=model, args=arguments, train_dataset=Lines())
        with pytest.raises(swapper.StateError, match=r"past the manager.*Trainer\(model, optimizers="):
            trainer.train()
        assert manager.step == 0


@pytest.mark.parametrize("library", ["torch", "accelerate", "trainer", "peft", "torchtitan"])
def test_two_ranks_go_the_way_of_plain_torch(tmp_path: Path, library: str) -> None:
    if library == "torchtitan":
        missing = "torchtitan is not installed: pip install --no-deps torchtitan tyro docstring_parser spmd_types"
        pytest.importorskip("torchtitan.components.optimizer", reason=missing, exc_type=ImportError)
    cases = [name for name, of in libraries_run.LIBRARIES.items() if of == library]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    done = run_python(*torchrun, Path(libraries_run.__file__), tmp_path, *cases)
    assert done.returncode == 0, done.stderr[-6000:]
    said = {line for line in done.stdout.splitlines() if line.startswith("rank ")}
    assert said == {f"rank {rank}, {case}: same" for rank in range(2) for case in cases}


def test_a_number_of_the_cpu_changes_nothing_and_copies_do_not_know_swapper(tmp_path: Path) -> None:
    """As accelerate moves a model in a job of several CPU ranks: resident and cold parameters, and those of models in a list."""
    models = [layers(), torch.nn.Linear(4, 4)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    expected = [value.clone() for model in models for value in model.state_dict().values()]
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        manager.offload(models, optimizer, **NVME)
        for model in models:
            assert model.to("cpu:0") is model
            copy = deepcopy(model)
            assert "_apply" not in vars(copy) and copy.to("cpu:0") is copy
        with pytest.raises(swapper.ColdParameterError, match="apply them before"):
            models[0].double()
        found = [value.clone() for model in models for value in model.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not any("_apply" in vars(model) for model in models)
