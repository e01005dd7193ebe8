"""A script of accelerate, with a small Llama of Transformers."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import unisono
from benchmarks.frameworks import UNISONO, Note

BATCHES = 64
LENGTH = 64


def train(way: str, batch_size: int, workers: int, note: Note) -> None:
    """Train until the process is stopped."""
    is_ours = way == UNISONO
    accelerator = unisono.accelerate.Accelerator(shards=workers) if is_ours else Accelerator(cpu=True)
    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(256, (BATCHES * batch_size, LENGTH))
    loader = DataLoader(TensorDataset(rows), batch_size=batch_size if is_ours else batch_size // workers, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    while True:
        for (batch,) in loader:
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                note()
