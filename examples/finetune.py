"""Fine-tunes a causal language model of transformers that does not fit in memory, with transformers' own Trainer.

    python examples/finetune.py --model path/to/model --text lines.txt --directory /nvme/run          # all parameters
    python examples/finetune.py --model path/to/model --text lines.txt --directory /nvme/run --lora 8  # adapters by peft

With `torchrun --nproc-per-node 2` or `accelerate launch --cpu --num_processes 2` in place of `python`, two processes train one
model on other samples each: accelerate puts DistributedDataParallel around it.

`path/to/model` is a directory as `save_pretrained` or `huggingface-cli download` leaves it. It is read tensor by
tensor; the model is never whole in memory. Run the same command again to resume a killed run: it continues at its last step,
with that step's data, learning rate and random numbers, and the result is that of a run that was not killed. Needs transformers
and accelerate, and peft for --lora.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

import swapper
from swapper.integrations.transformers import for_training, offloaded


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="a sample a line")
    parser.add_argument("--directory", type=Path, required=True, help="for the run, on an NVMe drive")
    parser.add_argument("--budget", default="2GiB", help="host memory for swapper (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank instead of the model")
    return parser.parse_args()


def samples(tokenizer: Any, path: Path) -> list[dict[str, torch.Tensor]]:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    tokens = [tokenizer(line, truncation=True, max_length=256, return_tensors="pt")["input_ids"][0] for line in lines]
    return [{"input_ids": each, "labels": each} for each in tokens]


class Progress(TrainerCallback):
    """Prints the time of each step by phase."""

    def __init__(self, manager: swapper.SwapManager) -> None:
        self._manager = manager

    def on_step_end(self, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.is_world_process_zero:
            print(f"step {state.global_step:3}  {self._manager.stats().brief}")


def main() -> None:
    options = parse_arguments()
    ranks = PartialState(cpu=True)  # joins the other processes, if any; before the manager: all resume from one step
    model, values = for_training(AutoModelForCausalLM, options.model)
    if options.lora:
        from peft import LoraConfig

        from swapper.integrations.peft import get_peft_model

        model = get_peft_model(model, LoraConfig(r=options.lora, task_type="CAUSAL_LM", target_modules="all-linear"))
    arguments = TrainingArguments(
        output_dir=str(options.directory / "trainer"), max_steps=options.steps, per_device_train_batch_size=1,
        learning_rate=1e-4, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    masters = torch.float32 if model.dtype in (torch.bfloat16, torch.float16) else None
    placement = {"params": "nvme", "optimizer_state": "nvme"}  # so that each step is committed at no cost
    with swapper.SwapManager(options.directory, options.budget, resume="auto", rng=True) as manager:
        make = offloaded(Trainer, manager, init=values, master_weights=masters, **placement)
        trainer = make(model, arguments, train_dataset=samples(tokenizer, options.text), callbacks=[Progress(manager)])
        ranks.on_main_process(print)(manager)
        trainer.train()
        trainer.save_model(str(options.directory / "result"))
        ranks.on_main_process(print)(f"written: {options.directory / 'result'}, which from_pretrained opens")
    ranks.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Interrupted: the same command continues after the last step.") from None
