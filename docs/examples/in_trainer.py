"""Trains a small GPT-2 with the Trainer of Transformers, and goes on where it stopped.

torchrun --nproc-per-node 2 in_trainer.py folder --steps 6
torchrun --nproc-per-node 2 in_trainer.py folder --steps 12  # goes on with the seventh
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from commhooks.hosts.transformers import CommHook


def dataset() -> list[dict[str, torch.Tensor]]:
    """Random texts, the same on every process."""
    tokens = torch.randint(100, (256, 32), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(args.folder),
            max_steps=args.steps,
            save_steps=6,
            logging_steps=3,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            use_cpu=True,  # with GPUs: leave it out
            report_to=[],
        ),
        train_dataset=dataset(),
    )
    comm = CommHook("powersgd", rank=4, start_step=2).attach(trainer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.folder))
    if trainer.is_world_process_zero():
        print(comm.hook.summary())


if __name__ == "__main__":
    main()
