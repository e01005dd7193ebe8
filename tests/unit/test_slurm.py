"""What unisono slurm writes, read back as Slurm reads it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from called import unisono
from unisono.errors import JobError, LaunchError
from unisono.launch.settings import Script
from unisono.launch.slurm_job import (
    Allocation,
    BatchJob,
    directive,
    read_nodes,
    require_valid,
    seconds_of,
    split_words,
    submit,
    text_of,
    write,
)

pytestmark = pytest.mark.unit

anything = st.text(st.characters(exclude_characters="\0"))
"""What arguments and paths may be, and more."""

printed = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1)

ALLOCATION = Allocation("00:30:00", gpus=4)
JOB = BatchJob(Script("train.py"), ALLOCATION, "train", Path("/home/me"), "/usr/bin/python3")


def job(**changes: Any) -> BatchJob:
    return replace(JOB, **changes)


def allocated(**changes: Any) -> BatchJob:
    return job(allocation=replace(ALLOCATION, **changes))


def text(job: BatchJob) -> str:
    return text_of(job, ["unisono", "slurm"])


def directives_of(script: str) -> list[str]:
    """What sbatch takes from a script: ``_opt_batch_script`` in Slurm's src/sbatch/opt.c, line by line."""
    found: list[str] = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            found += _arguments(line.removeprefix("#SBATCH"))
        elif line.strip(" \t\v\f\r") and not line.lstrip(" \t\v\f\r").startswith("#"):
            break
    return found


def _arguments(line: str) -> list[str]:
    """``get_argument`` there, until nothing is left."""
    found: list[str] = []
    at = 0
    while True:
        argument, escaped, quote = None, False, ""
        while at < len(line) and line[at].isspace():
            at += 1
        assert line[at : at + 1] != ":", line
        while at < len(line) and (quote or not line[at].isspace()):
            char = line[at]
            if escaped:
                escaped = False
            elif char == "\\":
                at += 1
                escaped = True
                continue
            elif quote and char == quote:
                quote = ""
                at += 1
                continue
            elif not quote and char in "\"'":
                quote = char
                at += 1
                continue
            elif not quote and char == "#":
                break
            argument = (argument or "") + char
            at += 1
        assert not quote, line
        if argument is None:
            return found
        found.append(argument)


@given(printed)
@example('a "b" \\ \' #c $(d) `e`')
@example("\\")
@example("\u2028 \xa0")
@example("--nodes=9 :")
def test_slurm_takes_an_option_with_any_value_for_one_argument(value: str) -> None:
    assert directives_of(f"#SBATCH {directive('job-name', value)}") == [f"--job-name={value}"]


@pytest.mark.parametrize("value", ["", "a\nb", "a\rb", "\x7f", "a\0", "\udc80"])
def test_what_no_line_can_hold_is_refused(value: str) -> None:
    with pytest.raises(JobError, match="--job-name"):
        text(job(name=value))


@given(printed, anything, anything, anything, anything, anything)
@example("n", "\n#SBATCH --nodes=9\n", "/a\n#SBATCH -n9", "\n#SBATCH hetjob", "'\n#SBATCH -n9", "\n#SBATCH -n9")
def test_nothing_that_is_named_freely_becomes_an_option_of_slurm(
    name: str, script: str, folder: str, argument: str, command: str, runs: str
) -> None:
    written = text_of(
        job(
            name=name,
            script=Script(script, (argument, "")),
            folder=Path("/", folder),
            runs=Path(runs),
            workers=(1, 2, 4),
            modules=("cuda/12.8",),
        ),
        [command],
    )
    options = [
        *(f"--job-name={name}", "--time=00:30:00", "--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=4"),
        *("--array=0-2", "--requeue", "--open-mode=append", "--signal=TERM@120"),
    ]
    assert directives_of(written) == options
    # Wherever one looks for them: nothing of it begins a line.
    assert [line for line in written.split("\n") if line.startswith("#SBATCH")] == written.split("\n")[2:11]


def test_all_that_the_cluster_is_asked_for_is_written() -> None:
    asked = allocated(nodes=2, cores=10, account="abc@v100", partition="gpu_p13,gpu_p2", more=("constraint=v100&32g",))
    assert directives_of(text(asked))[1:-3] == [
        *("--time=00:30:00", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=10", "--gpus-per-node=4"),
        *("--account=abc@v100", "--partition=gpu_p13,gpu_p2", "--constraint=v100&32g"),
    ]
    assert "    --ntasks-per-node=4 \\\n    --cpus-per-task=10 \\\n    /usr/bin/python3 train.py\n" in text(asked)


def test_a_range_of_nodes_is_slurms_to_choose_from_at_each_start() -> None:
    assert read_nodes("2-4") == (2, 4)
    assert read_nodes("4") == (None, 4)
    written = text(allocated(nodes=4, least_nodes=2))
    assert directives_of(written)[1:4] == ["--time=00:30:00", "--nodes=2-4", "--mincpus=4"]
    assert '--ntasks="$((SLURM_JOB_NUM_NODES * 4))"' in written


def test_workers_on_cpus_need_no_gpu() -> None:
    written = text(allocated(gpus=0, workers_per_node=3, nodes=2))
    assert "gpu" not in written
    assert "--ntasks-per-node=3" in directives_of(written)
    assert '--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * 3))"' in written


def test_each_element_of_an_array_uses_as_few_nodes_as_it_needs() -> None:
    written = text(replace(allocated(nodes=4, gpus=4), workers=(1, 4, 5, 16)))
    assert "all_workers=(1 4 5 16)" in written
    assert "all_nodes=(1 1 2 4)" in written


def test_a_study_is_one_task_with_the_cores_of_all_its_workers() -> None:
    study = replace(allocated(cores=10), study_words=("--steps", "9", "--", "--lr", "a b"))
    written = text(study)
    assert "--ntasks-per-node=1" in directives_of(written)
    assert "--cpus-per-task=40" in directives_of(written)
    assert "-m unisono study train.py --out \"$folder\" --steps 9 -- --lr 'a b'\n" in written
    assert "UNISONO_RUN_DIR" not in written  # each of its runs has a folder of its own
    assert '"$code" -eq 143' in written
    written = text(replace(study, workers=(2, 4)))
    assert '--out "$folder" --workers "$workers" --steps 9' in written


def test_a_script_whose_name_begins_with_a_dash_is_no_option_of_python() -> None:
    assert " ./-c\n" in text(job(script=Script("-c")))
    assert " -m package.train\n" in text(job(script=Script("package.train", is_module=True)))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("4", 240), ("30:00", 1800), ("00:30:00", 1800), ("2-0", 172800), ("1-2:03", 93780), ("1-2:03:04", 93784)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(limit: str, seconds: int) -> None:
    assert seconds_of(limit) == seconds


@pytest.mark.parametrize("limit", ["", "0", "3", "1h", "-5", "1:2:3:4", "00:30:00\n", "٣٠", "1-2:", "UNLIMITED"])
def test_a_time_limit_that_is_none_or_too_short_is_refused(limit: str) -> None:
    with pytest.raises(JobError, match="--time"):
        seconds_of(limit)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (allocated(nodes=0), "--nodes 0: at least 1"),
        (allocated(nodes=2, least_nodes=3), "--nodes 3-2: the smallest number first"),
        (allocated(nodes=2, least_nodes=0), "--nodes 0-2: the smallest number first, and at least 1"),
        (replace(allocated(nodes=2, least_nodes=1), workers=(1, 8)), "--workers with --nodes 1-2"),
        (allocated(gpus=-1), "--gpus -1: at least 0"),
        (allocated(gpus=0), "how many workers"),
        (allocated(gpus=0, workers_per_node=0), "--workers-per-node 0"),
        (allocated(workers_per_node=2), "each GPU has one worker"),
        (allocated(cores=0), "--cores-per-gpu 0"),
        (allocated(account="a b"), "--account 'a b'"),
        (allocated(partition="-p"), "--partition '-p'"),
        (allocated(partition="gpu\n"), "--partition"),
        (allocated(more=("qos",)), "--sbatch 'qos'"),
        (allocated(more=("Qos=a",)), "--sbatch 'Qos=a'"),
        (allocated(more=("array=0-9",)), "Unisono writes or needs --array"),
        (allocated(more=("qos=a\nb",)), "--sbatch qos="),
        (job(modules=("a; rm",)), "--module 'a; rm'"),
        (job(python="-c"), "--python '-c'"),
        (job(workers=(5,)), "--workers 5: the job has room for 1 to 4"),
        (job(workers=(1, 1)), "twice"),
        (job(requeues=-1), "--requeues -1"),
        (replace(allocated(nodes=2, least_nodes=1), study_words=()), "study with --nodes 1-2"),
        (replace(allocated(nodes=2, cores=1), workers=(1,), study_words=()), "study with --nodes 2"),
        (job(study_words=()), "--cores-per-gpu"),
        (replace(allocated(cores=1), workers=(1,), study_words=("--workers=1",)), "before study and after it"),
    ],
)
def test_what_cannot_work_is_refused_and_says_which_option(wrong: BatchJob, words: str) -> None:
    with pytest.raises(JobError) as refused:
        text(wrong)
    assert words in str(refused.value)


def test_words_behind_the_script_are_its_own_unless_they_ask_for_a_study() -> None:
    assert split_words(["--lr", "0.1"]) == (False, ("--lr", "0.1"))
    assert split_words(["study", "--steps", "9", "--", "study"]) == (True, ("--steps", "9", "--", "study"))
    assert split_words(["--", "study"]) == (False, ("study",))
    assert split_words([]) == (False, ())


def test_a_file_of_somebody_elses_is_not_overwritten_and_one_of_ours_is(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    write(text(JOB), path)
    write(text(job(name="again")), path)
    assert "again" in path.read_text()
    for other in ("", "#!/bin/bash\n", "#!/bin/bash\n# mine\n"):
        path.write_text(other)
        with pytest.raises(JobError, match="name another file"):
            write(text(JOB), path)
        assert path.read_text() == other
    with pytest.raises(JobError, match="cannot be written"):
        write(text(JOB), tmp_path / "no" / "job.sh")


def test_bytes_that_are_no_text_are_written_as_they_are(tmp_path: Path) -> None:
    write(text(job(script=Script("train.py", ("\udcff",)))), tmp_path / "job.sh")
    assert b"train.py '\xff'\n" in (tmp_path / "job.sh").read_bytes()


def test_bash_is_asked_whether_it_understands_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    require_valid(text(JOB))
    with pytest.raises(LaunchError, match="bash does not understand"):
        require_valid("if\n")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="bash -n"):
        require_valid(text(JOB))


def test_where_there_is_no_sbatch_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="there is no sbatch here"):
        submit(text(JOB), None)


def test_what_sbatch_refuses_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'invalid account' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(LaunchError, match=r"sbatch refused \(exit code 1\): invalid account"):
        submit(text(JOB), None)


def test_without_jinja2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(JobError, match=r"pip install '\.\[study\]'"):
        text(JOB)


def test_the_command_prints_a_script_that_starts_where_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNISONO_CHECKPOINT_EVERY", raising=False)
    (tmp_path / "train.py").write_text("")
    options = ["--time", "30", "--gpus", "2", "--module", "a/1", "--checkpoint-every", "50"]
    options += ["--numerics", "portable", "--", "--lr", "0.1"]
    assert unisono("slurm", "train.py", *options) == 0
    written = capfd.readouterr().out
    assert f"cd -- {tmp_path} || exit 1\nmodule load a/1 || exit 1\n" in written
    assert f"    {sys.executable} train.py --lr 0.1\n" in written
    assert "\nexport UNISONO_CHECKPOINT_EVERY=50\n" in written
    assert "\nexport MKL_CBWR=COMPATIBLE\n" in written
    assert "#SBATCH --job-name=train\n" in written
    assert written.startswith("#!/bin/bash\n# written by: unisono slurm train.py --time 30 ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nope.py", "--time", "30", "--gpus", "1"], "there is no script nope.py"),
        (["train.py", "--time", "soon", "--gpus", "1"], "--time 'soon'"),
        (["train.py", "--time", "30"], "how many workers?"),
        (["train.py", "--time", "30", "--gpus", "1", "--nodes", "2-"], "--nodes '2-'"),
        (["train.py", "--time", "30", "--gpus", "1", "--workers", "x"], "--workers 'x'"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert unisono("slurm", *options) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("unisono: error: ")
    assert words in line


@pytest.mark.parametrize(("code", "asked"), [(75, True), (143, True), (1, False), (0, False)])
def test_a_job_that_slurm_asked_to_leave_is_put_back_also_if_its_workers_were_still_loading_torch(
    tmp_path: Path, code: int, asked: bool
) -> None:
    for name, body in (("srun", f"exit {code}"), ("scontrol", 'echo "$@" > asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    written = text(job(folder=tmp_path))
    done = subprocess.run(["/bin/bash", "-c", written], env=environment, capture_output=True, check=False)
    assert done.returncode == (75 if asked else code)
    assert (tmp_path / "asked").exists() == asked
    assert not asked or (tmp_path / "asked").read_text() == "requeue incomplete 7\n"
