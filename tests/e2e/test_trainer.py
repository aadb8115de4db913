"""A Trainer of transformers or of TRL that is `offloaded` trains as the plain one does, and continues where it was killed."""

from __future__ import annotations

import difflib
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice

import swapper
from e2e import trainer_run
from e2e.processes import run_python
from e2e.trainer_run import (
    DROPOUT,
    NVME,
    AtStep,
    Lines,
    arguments_of,
    logged,
    offloaded_trainer,
    plain_trainer,
    write_model,
)
from e2e.twins import smallest_budget
from swapper.integrations.transformers import OffloadTrainerMixin, offloaded

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer
from transformers.training_args import ParallelMode


def interrupt() -> None:
    raise KeyboardInterrupt


HERE = Path(__file__).parent


def values(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    "options",
    [
        {},  # fused AdamW
        {"optim": "adamw_torch", "lr_scheduler_type": "linear", "adam_beta2": 0.9},
        {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "constant_with_warmup"},
        {"optim": "rmsprop", "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    ],
    ids=["default", "adamw, linear", "sgd", "rmsprop, restarts"],
)
def test_the_optimizer_of_the_training_arguments_is_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its class, rate, groups with and without weight decay, and its schedule."""
    model = write_model(tmp_path / "model")
    plain = plain_trainer(tmp_path, model, **options)
    plain.train()
    ours = offloaded_trainer(tmp_path / "run", model, **options)
    with ours.manager:
        ours.train()
        assert logged(ours) == logged(plain) and len(logged(ours)) == 8
        assert_equal(values(ours), values(plain))
        groups = [
            [
                {name: value for name, value in group.items() if name != "params"}
                for group in trainer.optimizer.param_groups
            ]
            for trainer in (ours, plain)
        ]
        assert groups[0] == groups[1] and [group["weight_decay"] for group in groups[0]] == [0.1, 0.0]


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_step_that_finds_no_memory_on_the_device_is_run_again_with_less_for_swapper(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    model, device = write_model(tmp_path / "model"), HostDevice("late")
    plain = plain_trainer(tmp_path, model)
    plain.train()
    options = {**NVME, "device": device, "device_memory": "16MiB"}
    made = AutoModelForCausalLM.from_pretrained(model, **DROPOUT)
    ours = offloaded(Trainer, tmp_path / "run", **options)(made, arguments_of(tmp_path), train_dataset=Lines())
    left = [device]

    def fail(*_: Any) -> None:
        if ours.state.global_step == 3 and left:
            left.pop().module.failures += 1
            raise torch.OutOfMemoryError("Tried to allocate")

    head = ours.model.lm_head
    if when == "forward":
        head.register_forward_hook(fail)
    else:
        head.register_full_backward_hook(fail)
    with ours.manager:
        ours.train()
        assert not left and "cpu ran out of memory" in caplog.text
        assert logged(ours) == logged(plain)
        assert_equal(values(ours), values(plain))


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_micro_batches_of_a_step_run_together(tmp_path: Path, update: str, dropout: float) -> None:
    """Losses, norms and parameters are plain torch's, and parameters are read less often than one after the other."""
    options = {"gradient_accumulation_steps": 3, "max_grad_norm": 1e9}  # of 8 batches: an epoch's last step has two

    def loaded() -> Any:
        torch.manual_seed(1)
        return llama(num_hidden_layers=8, hidden_size=128, intermediate_size=256, attention_dropout=dropout)

    plain = Trainer(loaded(), arguments_of(tmp_path, **options), train_dataset=Lines())
    plain.train()
    read: dict[int | None, int] = {}
    for at_once in (1, 2, None):
        run = tmp_path / f"run-{at_once}"
        made = loaded()
        manager = swapper.SwapManager(run, smallest_budget(run, made, AdamW(made.parameters()), update=update, **NVME))
        make = offloaded(Trainer, manager, at_once=at_once, update=update, **NVME)
        ours = make(made, arguments_of(run, **options), train_dataset=Lines())
        with manager:
            ours.train()
            assert logged(ours) == logged(plain) and len(logged(ours)) == 6
            assert_equal(values(ours), values(plain))
            read[at_once] = sum(manager.counters.snapshot()["read_bytes"].values())
            assert not [thread for thread in threading.enumerate() if "(_work)" in thread.name]
    assert read[None] < read[2] < read[1]


class Scaled(Trainer):
    """A Trainer as fp16=True makes it on a GPU: autocast to fp16, and a loss scale that grows until steps are skipped."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)


def scaled_trainer(directory: Path, at_once: int | None, *callbacks: Any, manager: Any = None) -> Any:
    kind = Scaled if manager is None else offloaded(Scaled, manager, at_once=at_once, **NVME)
    arguments = arguments_of(directory, fp16=True, max_steps=12)
    torch.manual_seed(1)
    return kind(llama(num_hidden_layers=3), arguments, train_dataset=Lines(), callbacks=list(callbacks))


@pytest.mark.parametrize("at_once", [1, None])
def test_a_loss_scale_goes_its_way_through_skipped_steps_and_a_stop(tmp_path: Path, at_once: int | None) -> None:
    """In each step it is as with plain torch, and a resumed run begins with it, and with the data of its step."""
    plain = scaled_trainer(tmp_path, 1)
    assert plain.accelerator.mixed_precision == "fp16"
    plain.train()
    expected = list(
        map(str, logged(plain))
    )  # norms of skipped steps are not numbers, which are not equal to themselves
    run = tmp_path / "run"
    stop = AtStep(8, interrupt)
    with (first := scaled_trainer(run, at_once, stop, manager=run)).manager, pytest.raises(KeyboardInterrupt):
        first.train()
    taken = first.manager.step
    assert list(map(str, logged(first))) == expected[:8] and 0 < taken < 8, "no step was skipped: nothing is tested"
    with (last := scaled_trainer(run, at_once, manager=run)).manager:
        last.train()
        assert list(map(str, logged(last))) == expected[-len(logged(last)) :] and len(logged(last)) >= 4
        assert_equal(values(last), values(plain))
        assert last.accelerator.scaler.state_dict() == plain.accelerator.scaler.state_dict()


def test_a_backward_that_the_user_has_set_is_called_and_stays(tmp_path: Path) -> None:
    def trained(kind: type) -> Any:
        torch.manual_seed(1)
        trainer: Any = kind(llama(num_hidden_layers=3), arguments_of(tmp_path), train_dataset=Lines())
        usual = trainer.accelerator.backward
        trainer.accelerator.backward = tripled = lambda loss, **options: usual(3 * loss, **options)
        trainer.train()
        assert trainer.accelerator.backward is tripled
        return trainer

    plain = trained(Trainer)
    ours = trained(offloaded(Trainer, tmp_path / "run", at_once=None, **NVME))
    with ours.manager:
        assert logged(ours) == logged(plain)
        assert_equal(values(ours), values(plain))


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda usual, loss: [usual(loss), usual(loss)], "called accelerator.backward 2 times"),
        (lambda usual, loss: None, "called accelerator.backward 0 times"),
        (lambda usual, loss: usual(loss, retain_graph=True), r"backward\(retain_graph=\) does not go with at_once="),
    ],
    ids=["twice", "never", "with an option"],
)
def test_a_backward_that_cannot_wait_is_refused(tmp_path: Path, backward: Any, message: str) -> None:
    trainer = offloaded(Trainer, tmp_path / "run", at_once=None, **NVME)(
        small(), arguments_of(tmp_path), train_dataset=Lines()
    )
    usual = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss, **options: backward(usual, loss)
    with trainer.manager, pytest.raises(swapper.UnsupportedError, match=message):
        trainer.train()


class Counting(Trainer):
    """Prepares inputs by a count, as TRL's GRPOTrainer."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "at_once", "error", "message"),
    [
        (Counting, None, swapper.UnsupportedError, "at_once=None does not go with Counting, which prepares"),
        (Trainer, 4, swapper.UnsupportedError, "at_once=4 does not go with activation_offloading=True"),
        (Trainer, 3, swapper.UnsupportedError, "at_once=3 does not go with several processes"),
        (Trainer, 0, swapper.ConfigError, "at_once=0 must be a positive number"),
    ],
)
def test_a_trainer_that_cannot_run_them_together_is_refused_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    at_once: int | None,
    error: type[swapper.SwapperError],
    message: str,
) -> None:
    arguments = arguments_of(tmp_path)
    arguments.activation_offloading = at_once == 4  # an option of TRL's SFTConfig and the like
    if at_once == 3:
        monkeypatch.setattr(type(arguments), "world_size", 2)  # as torchrun makes it
    with pytest.raises(error, match=message):
        offloaded(kind, tmp_path / "run", at_once=at_once)(small(), arguments, train_dataset=Lines())
    assert not (tmp_path / "run").exists()


def test_a_killed_training_continues_at_its_step(tmp_path: Path) -> None:
    """With its data, its schedule, its rates and its random numbers; twice, in both epochs and in the middle of a step."""
    model = write_model(tmp_path / "model")
    plain = plain_trainer(tmp_path, model)
    plain.train()
    run = tmp_path / "run"
    done = run_python(Path(trainer_run.__file__), run, 2)
    assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]
    with (second := offloaded_trainer(run, model, AtStep(5, interrupt))).manager, pytest.raises(KeyboardInterrupt):
        second.train()
    begun = 5 - len(logged(second))
    assert begun in (1, 2)  # where the kill was sooner than the second step's commit, that step is trained again
    assert logged(second) == logged(plain)[begun:5]
    last = offloaded_trainer(run, model)
    with last.manager:
        assert last.manager.step == 5
        last.train()
        assert logged(last) == logged(plain)[5:]
        assert_equal(values(last), values(plain))
        assert last.state.global_step == last.manager.step == plain.state.global_step == 8
    again = offloaded_trainer(run, model)
    with again.manager:  # it is over
        again.train()
        assert again.manager.step == 8
        assert_equal(values(again), values(plain))


def test_a_schedule_that_changes_more_than_rates_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_cycle(trainer: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        trainer.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            trainer.optimizer, 1e-2, total_steps=num_training_steps
        )
        return trainer.lr_scheduler

    monkeypatch.setattr(Trainer, "create_scheduler", one_cycle)
    model, run = write_model(tmp_path / "model"), tmp_path / "run"
    plain = plain_trainer(tmp_path, model)
    plain.train()
    with (first := offloaded_trainer(run, model, AtStep(5, interrupt))).manager, pytest.raises(KeyboardInterrupt):
        first.train()
    with (last := offloaded_trainer(run, model)).manager:
        last.train()
        assert logged(first) + logged(last) == logged(plain)
        assert_equal(values(last), values(plain))


def test_the_trainers_own_checkpoint_is_loaded_if_it_is_asked_for(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    model = write_model(tmp_path / "model")
    plain = plain_trainer(tmp_path, model, **saving)
    plain.train()
    with (first := offloaded_trainer(tmp_path / "run", model, **saving)).manager:
        first.train()
    checkpoint = tmp_path / "run" / "out" / "checkpoint-3"
    written = "model.safetensors"
    assert (checkpoint / written).read_bytes() == (tmp_path / "out" / "checkpoint-3" / written).read_bytes()
    for name in ("run", "new run"):  # one with steps of its own, and none
        with (ours := offloaded_trainer(tmp_path / name, model, **saving)).manager:
            ours.train(resume_from_checkpoint=str(checkpoint))
            assert logged(ours)[3:] == logged(plain)[3:]
            assert_equal(values(ours), values(plain))


def llama(**options: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))


def small(trial: object = None) -> LlamaForCausalLM:
    return llama()


def test_a_manager_and_a_class_of_ones_own(tmp_path: Path) -> None:
    manager = swapper.SwapManager(tmp_path, "32MiB")

    class Own(OffloadTrainerMixin, Trainer):
        swapper_run, swapper_options = manager, {"params": "nvme", "optimizer_state": "host"}

    trainer = Own(small(), arguments_of(tmp_path), train_dataset=Lines())
    trainer.train()
    assert trainer.manager is manager and manager.step == 8


def test_a_script_that_closes_nothing_loses_no_step(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    done = run_python(Path(trainer_run.__file__), tmp_path / "unclosed", -1)
    assert done.returncode == 0, done.stderr[-4000:]
    with swapper.SwapManager(tmp_path / "unclosed", "32MiB", resume="auto") as resumed:
        assert resumed.step == 8


class Sharded(Trainer):
    """A Trainer as TrainingArguments(deepspeed=...) makes it, where DeepSpeed is installed."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.is_deepspeed_enabled = True


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Sharded, {}, "deepspeed= makes an engine of its own"),
        (Trainer, {"fsdp": True}, "fsdp= makes an engine of its own"),
        (Trainer, {"fp16_full_eval": True}, "fp16_full_eval= would convert the model"),
        (Trainer, {"bf16_full_eval": True}, "bf16_full_eval= would convert the model"),
        (Trainer, {"n_gpu": 2}, "to 2 GPUs by DataParallel: start the script with torchrun"),
    ],
    ids=["deepspeed", "fsdp", "fp16_full_eval", "bf16_full_eval", "DataParallel"],
)
def test_training_arguments_that_cannot_work_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, options: dict[str, Any], message: str
) -> None:
    """Before the run has a directory, and before the first step."""
    options = dict(options)
    count = options.pop("n_gpu", 1)
    arguments = arguments_of(tmp_path, **options)
    arguments._n_gpu = count  # as two GPUs make it
    if arguments.fsdp:
        monkeypatch.setattr(type(arguments), "parallel_mode", ParallelMode.DISTRIBUTED)  # as torchrun makes it
    with pytest.raises(swapper.UnsupportedError, match=message):
        offloaded(kind, tmp_path / "run")(small(), arguments, train_dataset=Lines())
    assert not (tmp_path / "run").exists()


def test_what_makes_model_or_optimizer_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(swapper.UnsupportedError, match="model_init="):
        offloaded(Trainer, tmp_path)(None, arguments_of(tmp_path), model_init=small)
    with pytest.raises(swapper.ConfigError, match="give transformers' Trainer"):
        offloaded(small(), tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("rank-*"))


def test_a_run_that_cannot_be_offloaded_is_free_for_the_next_trainer(tmp_path: Path) -> None:
    """In a notebook, where the exception's frames keep the first one."""
    with pytest.raises(swapper.ConfigError) as refused:
        offloaded(Trainer, tmp_path / "run", params="tape")(small(), arguments_of(tmp_path), train_dataset=Lines())
    trainer = offloaded(Trainer, tmp_path / "run", params="nvme")(
        small(), arguments_of(tmp_path), train_dataset=Lines()
    )
    trainer.manager.close()
    assert refused.value.__traceback__ is not None


def test_a_run_that_went_back_to_a_checkpoint_continues_at_the_trainers_step(tmp_path: Path) -> None:
    """The manager has taken more steps by then than the Trainer counts."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    model, run = write_model(tmp_path / "model"), tmp_path / "run"
    plain = plain_trainer(tmp_path, model, **saving)
    plain.train()
    with (first := offloaded_trainer(run, model, **saving)).manager:
        first.train()
    checkpoint = str(run / "out" / "checkpoint-3")
    with (
        (second := offloaded_trainer(run, model, AtStep(5, interrupt), **saving)).manager,
        pytest.raises(KeyboardInterrupt),
    ):
        second.train(resume_from_checkpoint=checkpoint)
    with (last := offloaded_trainer(run, model, **saving)).manager:
        assert last.manager.step == 10
        last.train()
        assert last.state.global_step == 8 and logged(last) == logged(plain)[5:]
        assert_equal(values(last), values(plain))


def test_a_run_that_was_stopped_in_a_second_training_is_not_continued_by_guess(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    stop = AtStep(2, lambda: None)
    with (first := offloaded_trainer(tmp_path / "run", model, stop, max_steps=3)).manager:
        first.train()
        stop._act = interrupt
        with pytest.raises(KeyboardInterrupt):
            first.train()
    with (last := offloaded_trainer(tmp_path / "run", model, max_steps=3)).manager:
        with pytest.raises(swapper.StateError, match=r"stopped in call 2 of its Trainer's train\(\)"):
            last.train()


def test_a_script_of_trl_needs_two_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="SFTTrainer needs trl: pip install trl")
    scripts = {name: (HERE / f"sft_{name}.py").read_text() for name in ("plain", "offloaded")}
    texts = [scripts[name].partition("\n\n")[2].splitlines() for name in scripts]  # without the line about the script
    changed = [line for line in difflib.ndiff(*texts) if line.startswith("+ ") and line.strip() != "+"]
    assert len(changed) == 2, changed
    write_model_with_words(write_model(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    for name, script in scripts.items():
        monkeypatch.setattr(sys, "argv", [name, "model", name])
        exec(compile(script, f"sft_{name}.py", "exec"), {"__name__": "__main__"})
    assert (tmp_path / "run").is_dir()
    written = "model.safetensors"
    before = (tmp_path / "model" / written).read_bytes()
    assert before != (tmp_path / "plain" / written).read_bytes() == (tmp_path / "offloaded" / written).read_bytes()


def test_grpo_generates_and_trains_as_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its completions are generated by the model that is being trained."""
    trl = pytest.importorskip("trl", reason="GRPOTrainer needs trl: pip install trl")
    from datasets import Dataset
    from transformers import AutoTokenizer

    model = write_model(tmp_path / "model")
    write_model_with_words(model)
    monkeypatch.chdir(tmp_path)
    completed: list[list[Any]] = []

    def reward(completion_ids: list[list[int]], **others: Any) -> list[float]:
        completed.append(completion_ids)
        return [float(sum(tokens) % 7) for tokens in completion_ids]

    def trained(kind: type) -> Any:
        arguments = trl.GRPOConfig(
            "out", max_steps=3, per_device_train_batch_size=4, num_generations=4, max_completion_length=6, learning_rate=1e-3,
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        data = Dataset.from_list([{"prompt": "the red"}, {"prompt": "the blue fox"}] * 4)
        made, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        trainer: Any = kind(made, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        return trainer

    plain = trained(trl.GRPOTrainer)
    expected = len(completed)
    ours = trained(offloaded(trl.GRPOTrainer, tmp_path / "run", **trainer_run.NVME))
    with ours.manager:
        assert completed[expected:] == completed[:expected]
        assert_equal(values(ours), values(plain))
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any(not torch.equal(before[name], value) for name, value in values(plain).items())


def write_model_with_words(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", "the", "red", "blue", "old", "fox", "jumps", "over", "dog"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(path)
