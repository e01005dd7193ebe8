"""Mistakes in updates of whole matrices, in K-FAC and in what is measured of curvature."""

from mutants.mutant import Mutant

OWNED = "train/step/owned_update.py"
PIECES = "train/step/shared_pieces.py"
KFAC = "unisono_lab/second_order/kfac.py"
GRADIENTS = "train/step/gradients.py"
FIGURES = "unisono_lab/second_order/curvature_probe.py"

MATRICES = ("tests/unit/test_owned_update.py",)
FACTORS = ("tests/unit/test_kfac_factors.py", "tests/unit/test_kfac.py")
UPDATES = ("tests/unit/test_kfac.py",)
WRITES = ("tests/unit/test_struck_own_updates.py",)
CURVATURE = ("tests/unit/test_curvature.py", "tests/unit/test_struck_measurements.py")

MUTANTS = (
    Mutant(
        "what the owner of a matrix keeps is not given to the others",
        OWNED,
        "optimizer.state[matrix.parameter] = merged(optimizer.state[matrix.parameter], state)",
        "pass",
        MATRICES,
    ),
    Mutant(
        "a hook on the step of Muon sees its owner's matrices alone",
        OWNED,
        "        own = [matrix for matrix in matrices if matrix.worker == self._rank]\n",
        '        why = ""\n        own = [matrix for matrix in matrices if matrix.worker == self._rank]\n',
        MATRICES,
    ),
    Mutant(
        "every worker decomposes every factor of K-FAC",
        PIECES,
        "return self._workers.world_size > 1 and bool(costs) and sum(costs) >= self._least",
        "return False",
        UPDATES,
    ),
    Mutant(
        "the factors of K-FAC keep what all workers have sent in memory",
        PIECES,
        "next(tensors).clone()",
        "next(tensors)",
        UPDATES,
    ),
    Mutant(
        "a factor of K-FAC depends on how the batch is cut",
        KFAC,
        "return total / counts[0] if number == 0 else total * counts[1]",
        "return total / counts[0] if number == 0 else total",
        FACTORS,
    ),
    Mutant(
        "K-FAC counts a sample for each call of a layer",
        KFAC,
        "return max(0, samples - counted)",
        "return samples",
        FACTORS,
    ),
    Mutant(
        "an update is made from what is not finite: a gradient, or a factor of K-FAC",
        "train/step/gradient_parts.py",
        "return (not self._are_finite(),)",
        "return (False,)",
        ("tests/unit/test_not_finite.py", *FACTORS),
    ),
    Mutant(
        "K-FAC does not count the factors that it has seen",
        KFAC,
        '            state["estimates"] = state.get("estimates", torch.tensor(0.0)) + 1\n',
        "            pass\n",
        UPDATES,
    ),
    Mutant(
        "K-FAC clips by the square of what it should",
        KFAC,
        "math.sqrt(limit / size)",
        "(limit / size)",
        UPDATES,
    ),
    Mutant(
        "the factors of K-FAC count in the norm that gradients are clipped by",
        GRADIENTS,
        "self.parameters[: len(self.parameters) - statistics]",
        "self.parameters",
        FACTORS,
    ),
    Mutant(
        "Lanczos forgets the vector before",
        FIGURES,
        "            image = _added(image, previous, -off_diagonal[-1])\n",
        "            pass\n",
        CURVATURE,
    ),
    Mutant(
        "a product with the Hessian follows the vector of another step",
        FIGURES,
        "stream_seed(self._seed, Stream.CURVATURE, self._call.step, number)",
        "stream_seed(self._seed, Stream.CURVATURE, 0, 0)",
        CURVATURE,
    ),
    Mutant(
        "what a loop's body changes behind a measurement of curvature is not seen",
        FIGURES,
        "        self._engine.parts.measured()\n",
        "",
        WRITES,
    ),
)
