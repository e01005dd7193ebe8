"""Parameters that optimizers hold and no module does, those that no optimizer holds, and changes of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

import unisono
from script_cluster import Cluster, Kill
from unisono.errors import CheckpointError, ModelError, UnisonoWarning

Start = Callable[..., unisono.Run]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "outside.py"

INPUTS = torch.linspace(0, 99, 240).sin().view(60, 4)
DATA = TensorDataset(INPUTS, INPUTS.argmax(1) % 3)


@pytest.mark.cluster
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_what_only_optimizers_hold_is_the_same_on_any_number_of_workers_that_come_and_die(
    optimizer: str, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path)

    def done(workers: int | tuple[int, int], *kills: Kill) -> tuple[str, list[str]]:
        result = cluster(SCRIPT, workers, shards=8, arguments=[optimizer], kills=kills)
        return result.digest, result.said

    serial = done(1)
    assert serial[1]
    assert done(2) == serial
    assert done((2, 3), Kill(2, 1), Kill(5, 0)) == serial


@pytest.mark.unit
@pytest.mark.usefixtures("one_worker")
class TestOneWorker:
    @pytest.mark.parametrize("of", ["module", "tensor"])
    def test_a_resumed_run_goes_on_with_what_only_an_optimizer_holds(
        self, start: Start, tmp_path: Path, of: str
    ) -> None:
        def trained(steps: int | None, **settings: Any) -> tuple[str, Tensor]:
            run = start(batch_size=16, shards=2, **settings)
            model, centres = nn.Linear(4, 3), nn.Linear(3, 3, bias=False).weight
            held = centres if of == "module" else centres.detach().requires_grad_()
            run.prepare(model, AdamW([*model.parameters(), held], lr=0.1))
            for step in run.steps(DATA, epochs=3):
                step.run(lambda model, batch: F.cross_entropy(model(batch[0]) @ held, batch[1]))
                if step.number == steps:
                    run.close()
                    return "", held.detach().clone()
            digest = run.finish(model)
            assert digest != unisono.digest(model)  # it covers more
            return digest, held.detach().clone()

        whole = trained(None, run_dir=tmp_path / "whole")
        interrupted = {"run_dir": tmp_path / "run", "checkpoints": {"every": 2}}
        trained(6, **interrupted)
        before = unisono.load(nn.Linear(4, 3), tmp_path / "run")
        digest, held = trained(None, **interrupted)
        assert digest == whole[0]
        assert torch.equal(held, whole[1])
        assert not torch.equal(before.weight, unisono.load(nn.Linear(4, 3), tmp_path / "run").weight)

    def test_a_flipped_bit_of_it_changes_the_digest(self, start: Start) -> None:
        run = start(batch_size=16, shards=2)
        model, scale = nn.Linear(4, 3), torch.ones((), requires_grad=True)
        run.prepare(model, SGD([*model.parameters(), scale], lr=0.1))
        before = run.inside.trained.capture().digests()
        with torch.no_grad():
            scale.view(torch.int32).bitwise_xor_(1)
        assert run.inside.trained.capture().digests() != before

    def test_names_follow_from_optimizer_group_and_place(self, start: Start) -> None:
        run = start(batch_size=16, shards=2)
        model, one, other = nn.Linear(4, 3), torch.ones(2, requires_grad=True), torch.ones(3)
        groups: Any = [{"params": list(model.parameters())}, {"params": [other, one]}]
        run.prepare(model, [SGD(groups, lr=0.1), SGD([torch.ones(4, requires_grad=True)], lr=0.1)])
        prepared = run.inside.trained.require_prepared()
        assert list(prepared.outside) == ["optimizer0.group1.0", "optimizer0.group1.1", "optimizer1.group0.0"]
        assert list(prepared.parameters) == ["weight", "bias", "optimizer0.group1.1", "optimizer1.group0.0"]
        assert prepared.order()[0] == ["weight", "bias", "optimizer0.group1.0", "optimizer0.group1.1"]

    @pytest.mark.parametrize("several", [False, True])
    def test_an_optimizer_of_a_copy_is_refused(self, start: Start, several: bool) -> None:
        run = start(batch_size=16, shards=2)
        model, other = nn.Linear(4, 3), nn.Bilinear(2, 2, 2)
        strange = SGD(copy.deepcopy(model).parameters(), lr=0.1)
        said = r"the SGD holds no parameter of the Linear .*SGD\(model.parameters\(\), …\).*requires_grad_\(False\)"
        with pytest.raises(ModelError, match=said):
            run.prepare([other, model], [AdamW(other.parameters()), strange]) if several else run.prepare(
                model, strange
            )

    def test_an_optimizer_of_other_parameters_beside_the_models_is_none_of_a_copy(self, start: Start) -> None:
        run = start(batch_size=16, shards=2)
        model, teacher, scale = (
            nn.Linear(4, 3),
            nn.Linear(4, 3).requires_grad_(False),
            torch.ones(1, requires_grad=True),
        )
        run.prepare([model, teacher], [SGD(model.parameters(), lr=0.1), SGD([scale], lr=0.1)])
        run.prepare(teacher, SGD([scale], lr=0.1))  # a frozen model is calibrated

    def test_parameters_that_no_optimizer_holds_are_named_once(
        self, start: Start, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = start(batch_size=16, shards=2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        for _ in range(2):
            run.prepare(model, SGD(model[1].parameters(), lr=0.1))
        assert capsys.readouterr().out.count("0.weight and 1 more want a gradient, and no optimizer holds them") == 1
        model[0].requires_grad_(False)
        run.prepare(model, SGD(model[1].parameters(), lr=0.1))
        model[0].requires_grad_(True)
        run.prepare(model, SGD(model.parameters(), lr=0.1))
        assert "gradient" not in capsys.readouterr().out

    def test_toggling_requires_grad_of_one_of_two_models_names_the_parameter_and_the_way(self, start: Start) -> None:
        run = start(batch_size=16, shards=2)
        models = [nn.Linear(4, 3), nn.Linear(3, 2)]
        optimizers = [SGD(one.parameters(), lr=0.1) for one in models]
        run.prepare(models, optimizers)

        def loss_fn(models: Any, batch: Any) -> Tensor:
            return F.cross_entropy(models[1](models[0](batch[0])), batch[1] % 2)

        before = copy.deepcopy(models[1])
        for step in run.steps(DATA, epochs=1):
            step.run(loss_fn, optimizer=optimizers[0])
            assert torch.equal(before.weight, models[1].weight)
            models[1].requires_grad_(False)
            said = r"1\.weight was frozen, .*leave requires_grad as it is, .*step\.run\(loss_fn, optimizer=…\)"
            with pytest.raises(ModelError, match=said):
                step.run(loss_fn, optimizer=optimizers[0])
            models[1].requires_grad_(True)

    @pytest.mark.parametrize("way", ["group", "prepare", "kind"])
    def test_what_a_loops_body_changes_in_what_is_trained_is_said_where_runs_are_resumed(
        self, start: Start, tmp_path: Path, way: str
    ) -> None:
        def trained(steps: int | None, **settings: Any) -> None:
            run = start(batch_size=16, shards=2, run_dir=tmp_path / "run", **settings)
            model = nn.Sequential(nn.Linear(4, 4).requires_grad_(way == "kind"), nn.Linear(4, 3))
            optimizer: Any = SGD(model[1].parameters() if way == "group" else model.parameters(), lr=0.1)
            run.prepare(model, optimizer)
            for step in run.steps(DATA, epochs=3):
                step.run(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
                if step.number == 2:
                    model[0].requires_grad_(True)
                    if way == "group":
                        optimizer.add_param_group({"params": list(model[0].parameters())})
                    run.prepare(model, optimizer if way != "kind" else AdamW(model.parameters()))
                if step.number == steps:
                    break
            run.close()

        trained(None)  # nobody resumes it
        what = "another optimizer" if way == "kind" else "0.weight and 1 more"
        with pytest.warns(UnisonoWarning, match=rf"changes what is trained \({what}\): .*one loop for each phase"):
            trained(
                5,
                checkpoints={"every": 2},
            )
        with pytest.raises(
            CheckpointError,
            match="one loop per phase|one loop for each phase|between two loops|go on with the optimizers",
        ):
            trained(None, checkpoints={"every": 2})
