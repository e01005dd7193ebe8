"""How fast Unisono is, measured beside its peers: every figure of docs/performance.md comes from here.

    python -m benchmarks step         a training step, beside the plain loop, DDP, Fabric and Accelerate
    python -m benchmarks allreduce    the all-reduce alone, beside Gloo and the bandwidth of the memory
    python -m benchmarks fixed-cost   what a step costs that computes next to nothing
    python -m benchmarks shards       what more shards than workers cost, and exact beside native
    python -m benchmarks network      how much of the communication is hidden, over a slow network
    python -m benchmarks data-network what TLS between hosts costs, and sockets of our own beside Gloo
    python -m benchmarks recovery     a worker is killed: how long the others stand still, how soon a new one takes part
    python -m benchmarks growth       workers come and go: how long the others stand still, what a start costs them
    python -m benchmarks elastic      what it costs to be elastic while nobody comes or goes
    python -m benchmarks guests       what a run costs frameworks that train on it
    python -m benchmarks soak         half an hour of faults: what grows meanwhile, and whether the bits are right

What is compared is interleaved in random order, in fresh processes, with the same threads and the same allocator, so
that a machine that gets slower or faster meanwhile does so for all. Only ratios within one run mean something.
"""
