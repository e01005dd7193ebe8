"""An accelerate script that depends on what a turn of a loop's body finds: draws in updates, loaders side by side."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

run = unisono.init(seed=3, shards=4, checkpoints={"every": 2})
named = ProjectConfiguration(project_dir=str(run.dir / "states"), automatic_checkpoint_naming=True, total_limit=2)
accelerator = unisono.accelerate.Accelerator(run=run, project_config=named)
drawn = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(44, 6, generator=drawn), torch.randint(0, 3, (44,), generator=drawn)
body: Any = nn.Linear(6, 8)
body_optimizer: Any = torch.optim.SGD(body.parameters(), lr=0.1)
body, body_optimizer = accelerator.prepare(body, body_optimizer)
head: Any = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 3))
head_optimizer: Any = torch.optim.SGD(head.parameters(), lr=0.1)
head, head_optimizer = accelerator.prepare(head, head_optimizer)
loader: Any = DataLoader(TensorDataset(inputs[:30], labels[:30]), batch_size=8, shuffle=True)
questions: Any = DataLoader(TensorDataset(inputs[30:]), batch_size=3)
answers: Any = DataLoader(TensorDataset(labels[30:]), batch_size=3)
loader, questions, answers = accelerator.prepare(loader, questions, answers)
fault = Path(run.dir) / "main-worker-was-killed"
for epoch in range(3):
    body.train(), head.train()
    for batch, wanted in loader:
        accelerator.backward(F.cross_entropy(head(body(batch)), wanted))
        if accelerator.sync_gradients:
            for parameter in body.parameters():
                parameter.grad.add_(torch.randn_like(parameter), alpha=0.1)
        for optimizer in (body_optimizer, head_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.save_state()
    body.eval(), head.eval()
    told: list[int] = []
    for (batch,), (wanted,) in zip(questions, answers, strict=True):
        with torch.no_grad():
            found = head(body(batch)).argmax(1)
        right, places = accelerator.gather_for_metrics((found == wanted, wanted))
        told += (right * 10 + places).tolist()
    for turn, (wanted,) in enumerate(answers):
        if epoch == 1 and turn == 1 and run.world_size == 3 and run.is_main and not fault.exists():
            fault.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        told += accelerator.gather_for_metrics(wanted).tolist()
    assert told[-14:] == labels[30:].tolist()
    accelerator.print(f"epoch {epoch}: {json.dumps([accelerator.mean_loss, accelerator.save_iteration, told])}")
accelerator.end_training()
run.finish()
