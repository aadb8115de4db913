"""Fine-tunes a model on a few texts with TRL. Usage: sft_plain.py MODEL RESULT."""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
words = AutoTokenizer.from_pretrained(sys.argv[1])
data = Dataset.from_list([{"text": f"the {color} fox jumps over the {color} dog"} for color in ("red", "blue", "old")])
args = SFTConfig(sys.argv[2], max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True)

trainer = SFTTrainer(model, args=args, train_dataset=data, processing_class=words)
trainer.train()
trainer.save_model()
