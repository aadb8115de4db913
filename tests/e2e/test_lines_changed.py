"""Counts the lines of a script that change: each is run as it was and with swapper, and gives the same, bit for bit.

A line that begins with `-` is only in the plain script, one with `+` only in the other. Imports are not counted.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.trainer_run import Lines, write_model

PLAIN_LOOP = """
 import torch
+import swapper
 torch.manual_seed(0)
 model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
 optimizer = torch.optim.AdamW(model.parameters())
+manager = swapper.SwapManager("run", "16MiB")
+model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
 for _ in range(3):
     model(torch.randn(4, 256)).square().mean().backward()
     optimizer.step()
     optimizer.zero_grad()
 result = [value.clone() for value in model.state_dict().values()]
"""
PREPARE = " model, optimizer = accelerator.prepare(model, optimizer)\n"
OFFLOAD = """\
+manager = swapper.SwapManager("run", "16MiB")
+model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
"""
ACCELERATED = """
 import torch
 from accelerate import Accelerator
+import swapper
 torch.manual_seed(0)
 accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
 model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
 optimizer = torch.optim.AdamW(model.parameters())
HERE for _ in range(4):
     with accelerator.accumulate(model):
         accelerator.backward(model(torch.randn(4, 256)).square().mean())
         optimizer.step()
         optimizer.zero_grad()
 result = [value.clone() for value in accelerator.get_state_dict(model).values()]
"""
ACCELERATE = ACCELERATED.replace("HERE", OFFLOAD + PREPARE)
PREPARED_FIRST = ACCELERATED.replace("HERE", PREPARE + OFFLOAD.replace("+model, optimizer = ", "+"))
PEFT = """
 import torch
 from peft import LoraConfig, get_peft_model
 from transformers import AutoModelForCausalLM
+import swapper
 torch.manual_seed(0)
 model = AutoModelForCausalLM.from_pretrained("model")
 model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
 optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
+manager = swapper.SwapManager("run", "16MiB")
+model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
 for _ in range(3):
     model(input_ids=torch.arange(16)[None], labels=torch.arange(16)[None]).loss.backward()
     optimizer.step()
     optimizer.zero_grad()
 result = [value.clone() for value in model.state_dict().values()]
"""
TRAINER = """
 from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
+from swapper.integrations.transformers import offloaded
+Trainer = offloaded(Trainer, "run", params="nvme", optimizer_state="nvme")
 model = AutoModelForCausalLM.from_pretrained("model")
 arguments = TrainingArguments("out", max_steps=3, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
 trainer = Trainer(model, arguments, train_dataset=data)
 trainer.train()
 result = [value.clone() for value in trainer.model.state_dict().values()]
"""
LIGHTNING = """
 import lightning, torch
+import swapper
 torch.manual_seed(0)
+manager = swapper.SwapManager("run", "16MiB")
 class Module(lightning.LightningModule):
     def __init__(self):
         super().__init__()
         self.layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
     def training_step(self, batch, index):
         return self.layers(batch).square().mean()
     def configure_optimizers(self):
-        return torch.optim.AdamW(self.parameters())
+        return manager.offload(self, torch.optim.AdamW(self.parameters()), params="nvme", optimizer_state="nvme")[1]
 batches = torch.utils.data.DataLoader(torch.randn(16, 256), batch_size=4)
 module = Module()
 lightning.Trainer(max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False).fit(module, batches)
 result = [value.clone() for value in module.state_dict().values()]
"""
PIPELINE = """
 from transformers import pipeline
+from swapper.integrations.transformers import streamed
-generate = pipeline("text-generation", model="model", device="cpu")
+with streamed(host_memory="4MiB"):
+    generate = pipeline("text-generation", model="model", device="cpu")
 result = [generate("the fox", max_new_tokens=4, do_sample=False)[0]["generated_text"]]
"""
SENTENCES = """
 from sentence_transformers import SentenceTransformer
+from swapper.integrations.transformers import streamed
-model = SentenceTransformer("model", device="cpu")
+with streamed(host_memory="4MiB"):
+    model = SentenceTransformer("model", device="cpu")
 result = [model.encode(["the fox", "the old dog"], convert_to_tensor=True)]
"""
GRPO = """
 from datasets import Dataset
 from transformers import AutoModelForCausalLM, AutoTokenizer
 from trl import GRPOConfig, GRPOTrainer
+from swapper.integrations.transformers import offloaded
+GRPOTrainer = offloaded(GRPOTrainer, "run", params="nvme", optimizer_state="nvme")
 arguments = GRPOConfig(
     "out", max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=4, learning_rate=1e-3,
     save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True)
 prompts = Dataset.from_list([{"prompt": "the red"}, {"prompt": "the blue fox"}] * 4)
 reward = lambda completion_ids, **others: [float(sum(tokens) % 7) for tokens in completion_ids]
 model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
 trainer = GRPOTrainer(model, reward_funcs=reward, args=arguments, train_dataset=prompts, processing_class=tokenizer)
 trainer.train()
 result = [value.clone() for value in trainer.model.state_dict().values()]
"""
DIFFUSERS = """
 import torch
 from diffusers import UNet2DModel
+from swapper.integrations.diffusers import from_pretrained
-unet = UNet2DModel.from_pretrained("unet")
-for parameter in unet.parameters():  # kernels round by where a mapped file's tensors begin (docs/guides/diffusers.md)
-    parameter.data = parameter.data.clone()
+unet = from_pretrained(UNet2DModel, "unet", host_memory="6MiB")
 with torch.no_grad():
     result = [unet(torch.ones(1, 3, 16, 16), 1).sample]
"""
SCRIPTS = {
    "plain loop": (PLAIN_LOOP, "torch", 2),
    "accelerate": (ACCELERATE, "accelerate", 2),
    "accelerate, prepared first": (PREPARED_FIRST, "accelerate", 2),
    "peft": (PEFT, "peft", 2),
    "trainer": (TRAINER, "accelerate", 1),
    "grpo": (GRPO, "trl", 1),
    "lightning": (LIGHTNING, "lightning", 2),
    "pipeline": (PIPELINE, "transformers", 2),
    "sentence-transformers": (SENTENCES, "sentence_transformers", 2),
    "diffusers": (DIFFUSERS, "diffusers", 1),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(library: str) -> None:
    if library in ("accelerate", "transformers", "peft", "trl", "sentence_transformers"):
        from e2e.test_trainer import write_model_with_words

        write_model_with_words(write_model(Path("model")))
    if library == "diffusers":
        from diffusers import UNet2DModel

        torch.manual_seed(1)
        blocks = {"down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
        UNet2DModel(
            sample_size=16, block_out_channels=(64, 128), norm_num_groups=8, layers_per_block=1, **blocks
        ).save_pretrained("unet")


def run(script: str) -> list[Any]:
    torch.manual_seed(2)
    namespace: dict[str, Any] = {"__name__": "__main__", "data": Lines()}
    exec(compile(script, "script", "exec"), namespace)
    result: list[Any] = namespace.pop("result")
    namespace.clear()
    gc.collect()
    return result


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_or_two_lines_change_and_no_bit_of_the_result(name: str, place: Path) -> None:
    script, library, most = SCRIPTS[name]
    pytest.importorskip(library, reason=f"{library} is not installed")
    prepare(library)
    lines = script.strip("\n").splitlines()
    added = [line[1:] for line in lines if line[0] == "+" and not line[1:].startswith(("import ", "from "))]
    assert len(added) == most
    plain = run("\n".join(line[1:] for line in lines if line[0] != "+"))
    ours = run("\n".join(line[1:] for line in lines if line[0] != "-"))
    equal = torch.equal if isinstance(plain[0], torch.Tensor) else lambda a, b: a == b
    assert len(ours) == len(plain) and all(equal(a, b) for a, b in zip(ours, plain, strict=True))
