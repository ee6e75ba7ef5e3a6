"""Train with Hugging Face Accelerate. Syncline synchronizes the gradients.

ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/accelerate_train.py
syncline run -n 2 examples/accelerate_train.py
torchrun --nproc-per-node 2 examples/accelerate_train.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl

NUM_CLASSES = 4


def make_data(num_samples: int, *, seed: int) -> TensorDataset:
    """Make points around one center for each class."""
    centers = torch.randn(NUM_CLASSES, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    return TensorDataset(centers[labels] + torch.randn(num_samples, 16, generator=generator), labels)


def train(
    accelerator: Accelerator, epochs: range, *, resume_from: Path | None = None, save_to: Path | None = None
) -> float:
    """Train, and return the accuracy on samples that were held out."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(make_data(1000, seed=1), batch_size=16, shuffle=True)
    held_out = DataLoader(make_data(501, seed=2), batch_size=64)

    # Accelerate sets the device, mixed precision and compilation. With `evaluation_mode` it adds no wrapper of its own.
    model = accelerator.prepare_model(model, evaluation_mode=True)
    ddp = sl.DistributedDataParallel(model)
    optimizer, loader, held_out = accelerator.prepare(ddp.attach(optimizer), loader, held_out)
    if resume_from is not None:
        accelerator.load_state(str(resume_from))

    for epoch in epochs:
        loader.set_epoch(epoch)  # a resumed run shuffles as the whole run would
        ddp.train()
        for inputs, labels in loader:
            with accelerator.accumulate(ddp):  # one synchronization for all micro-batches of a step
                loss = F.cross_entropy(ddp(inputs), labels)
                ddp.report(loss=loss, weight=len(labels))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        record = ddp.last_step
        assert record is not None
        accelerator.print(f"epoch {epoch}: loss {record.metrics['loss']:.4f}")
    if save_to is not None:
        accelerator.save_state(str(save_to))

    ddp.eval()
    num_correct, num_samples = 0, 0
    with torch.no_grad():
        for inputs, labels in held_out:
            predicted, labels = accelerator.gather_for_metrics((ddp(inputs).argmax(dim=1), labels))
            num_correct += int((predicted == labels).sum())
            num_samples += len(labels)
    assert num_samples == 501  # each sample once, although 501 samples do not fill equal batches
    accelerator.print(f"held-out accuracy {num_correct / num_samples:.3f} of {num_samples} samples")
    accelerator.print(ddp.contract)
    return num_correct / num_samples


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with Accelerate.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--first-epoch", type=int, default=0, help="the number of epochs in --resume-from")
    parser.add_argument("--mixed-precision", default="no", choices=("no", "bf16"))
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in each step")
    parser.add_argument("--save-to", type=Path)
    parser.add_argument("--resume-from", type=Path)
    args = parser.parse_args()
    # On a machine without a GPU, Accelerate joins the ranks only with `cpu=True`. Otherwise each rank trains alone.
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    epochs = range(args.first_epoch, args.epochs)
    train(accelerator, epochs, resume_from=args.resume_from, save_to=args.save_to)
    accelerator.end_training()


if __name__ == "__main__":
    main()
