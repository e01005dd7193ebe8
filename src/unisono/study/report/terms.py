"""Words that a report uses, for who reads one for the first time."""

from __future__ import annotations

TERMS: tuple[tuple[str, str], ...] = (
    ("worker", "A process that trains on one device, together with others; W is their number."),
    ("epoch", "One pass over the data set. The first one is left out, for it starts things and fills caches."),
    ("step", "One update of the weights, from one global batch."),
    ("throughput", "Samples that are trained on per second: samples / time."),
    ("speedup", "S(W) = T(1) / T(W): how many times as fast W workers train as one does. Ideal is W."),
    ("efficiency", "S(W) / W: what share of W workers' time is worth something. Ideal is 100 %."),
    ("strong scaling", "More workers share the same global batch: the same training, sooner."),
    (
        "weak scaling",
        "Each worker keeps its batch, so the global batch grows with the workers, and the learning rate with it. That "
        "is another training: its loss need not be the same.",
    ),
    ("baseline", "The plain single-process loop, without anything for several workers."),
    ("median", "Half of the measurements are larger and half are smaller; a single bad one hardly moves it."),
    (
        "95 % interval",
        "Where the figure would be in 95 of 100 such studies. Of medians by bootstrap: the measurements are drawn "
        "again and again from themselves (Hoefler and Belli, SC 2015).",
    ),
    (
        "serial share",
        "After Karp and Flatt: (1/S − 1/W) / (1 − 1/W), what share of the work behaves as if only one worker could do "
        "it. If it grows with W, overhead grows; if it stays, that part of the work is serial.",
    ),
    ("Amdahl's law", "S(W) = 1 / (s + (1 − s)/W): a share s of the work stays serial, so S never exceeds 1/s."),
    ("Gustafson's law", "S(W) = W − s(W − 1): the work grows with the workers, and a share s of the time is serial."),
    (
        "universal scalability law",
        "S(W) = W / (1 + σ(W − 1) + κW(W − 1)): σ is waiting for what is shared, κ is what each worker costs each "
        "other one. With κ above 0 there is a number of workers beyond which more are slower.",
    ),
    ("exposed communication", "The part of the exchange of gradients that no computation hides."),
    ("waiting for the slowest", "All must have their gradients before anybody goes on: the others wait."),
    ("digest", "SHA-256 of all weights: the same digest means the same bits."),
    ("oversubscription", "More workers than cores: they take turns, and adding one cannot make anything faster."),
    ("data parallel", "Each worker has the whole model and a part of each batch. Model parallel: a part of the model."),
    ("mirrored variables", "The same weights on each worker, kept alike by adding up the gradients in every step."),
)
