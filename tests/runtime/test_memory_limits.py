"""What counts as memory: the machine's, its container's, the process's own limits."""

import resource

import pytest

from gpt2_fp8.runtime import memory_limits

GIB = 2**30
WHAT = "this control group (a container)"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system whose files say what a test writes."""
    monkeypatch.setattr(memory_limits, "ROOT", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(memory_limits, "_physical", lambda: 64 * GIB)

    def files(**texts):
        for name, text in texts.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return files


def test_a_machine_has_what_its_kernel_calls_available(system):
    assert memory_limits.narrowest() == (64 * GIB, 64 * GIB, "this machine")
    system(proc__meminfo=f"MemTotal: {64 << 20} kB\nMemAvailable: {5 << 20} kB\n")
    assert memory_limits.narrowest() == (5 * GIB, 64 * GIB, "this machine")
    assert memory_limits.machine_bytes() == 64 * GIB


@pytest.mark.parametrize("inside", [True, False], ids=["in a container", "on its host"])
def test_a_container_of_either_version_counts(system, inside):
    below = "" if inside else "pod__box__"
    path = "/../../pod/box" if inside else "/pod/box"
    system(**{
        "proc__self__cgroup": f"0::{path}\n",
        f"sys__fs__cgroup__{below}memory_dot_max": f"{8 * GIB}\n",
        f"sys__fs__cgroup__{below}memory_dot_current": f"{5 * GIB}\n",
        f"sys__fs__cgroup__{below}memory_dot_stat": f"anon 1\ninactive_file {2 * GIB}\n",
    })  # fmt: skip
    assert memory_limits.narrowest() == (5 * GIB, 8 * GIB, WHAT)
    system(proc__self__cgroup=f"9:cpu:/x\n4:memory:{path}\n", **{
        f"sys__fs__cgroup__memory__{below}memory_dot_limit_in_bytes": f"{3 * GIB}\n",
        f"sys__fs__cgroup__memory__{below}memory_dot_usage_in_bytes": f"{2 * GIB}\n",
    })  # fmt: skip
    assert memory_limits.narrowest() == (1 * GIB, 3 * GIB, WHAT)
    assert memory_limits.machine_bytes() == 3 * GIB


def test_a_group_without_a_limit_is_none(system):
    system(
        proc__self__cgroup="0::/a\n4:memory:/a\n", sys__fs__cgroup__a__memory_dot_max="max\n",
        sys__fs__cgroup__memory__a__memory_dot_limit_in_bytes="9223372036854771712\n",
    )  # fmt: skip
    assert memory_limits.narrowest() == (64 * GIB, 64 * GIB, "this machine")


def test_limits_of_the_process_count(system, monkeypatch):
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (4 * GIB if kind == resource.RLIMIT_AS else resource.RLIM_INFINITY, 0)
    )
    system(proc__self__statm=f"{GIB // memory_limits.os.sysconf('SC_PAGE_SIZE')} 1 1 1 0 1 0\n")
    assert memory_limits.narrowest() == (2 * GIB, 4 * GIB, "ulimit -v")
