"""Train a small language model with the Trainer of Hugging Face Transformers. Syncline synchronizes the gradients.

syncline run -n 2 examples/transformers_trainer.py
torchrun --nproc-per-node 2 examples/transformers_trainer.py
ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/transformers_trainer.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import syncline as sl

VOCABULARY = 64
IGNORED = -100  # the Trainer does not count labels of this value


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Arithmetic sequences modulo the vocabulary, of unequal lengths, filled up with padding."""

    def __init__(self, num_sequences: int, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCABULARY, (num_sequences, 1), generator=generator)
        differences = torch.randint(1, 4, (num_sequences, 1), generator=generator)
        self.tokens = (starts + differences * torch.arange(16)) % VOCABULARY  # (num_sequences, 16)
        self.lengths = torch.randint(4, 17, (num_sequences,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, is_padding = self.tokens[index], torch.arange(16) >= self.lengths[index]
        return {"input_ids": tokens, "labels": tokens.masked_fill(is_padding, IGNORED)}


def make_trainer(directory: str, **arguments: object) -> Trainer:
    set_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    defaults = {
        "output_dir": directory,
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": 20,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_steps": 10,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**(defaults | arguments)),
        train_dataset=Sequences(400, seed=1),
        eval_dataset=Sequences(50, seed=2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with the Trainer.")
    parser.add_argument("--output", default=tempfile.gettempdir() + "/transformers_trainer")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in the directory"
    )
    args = parser.parse_args()

    # The Trainer wraps its model through Accelerate, which reads the class under this name. Do this before `train`.
    torch.nn.parallel.DistributedDataParallel = sl.DistributedDataParallel  # type: ignore[misc]

    trainer = make_trainer(args.output)
    result = trainer.train(resume_from_checkpoint=args.resume)
    loss = trainer.evaluate()["eval_loss"]  # mean over the samples of all ranks
    if trainer.is_world_process_zero():
        print(f"{result.global_step} steps, evaluation loss {loss:.4f}")
        print(trainer.model_wrapped.contract)


if __name__ == "__main__":
    main()
