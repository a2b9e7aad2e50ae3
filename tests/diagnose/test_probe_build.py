"""Headers and libraries, found in the order in which builds and the loader look."""

from gpt2_fp8.diagnose import probe, probe_build


def test_the_cudnn_that_stands_first(tmp_path, monkeypatch):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libcudnn.so.9.14.0").touch()
    (tmp_path / "two/libcudnn.so.9").symlink_to("libcudnn.so.9.14.0")
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    monkeypatch.delenv("CUDNN_PATH", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/none::{tmp_path}/two")
    first = probe_build.preferred("libcudnn.so.*")[0]
    assert first.parent == tmp_path / "two"
    assert probe.version_in(str(tmp_path / "two/libcudnn.so.9")) == "9.14.0"
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    assert probe_build.preferred("libcudnn.so.*") == []
    monkeypatch.setenv("CUDNN_HOME", str(tmp_path))
    (tmp_path / "one").rename(tmp_path / "lib")
    assert probe_build.preferred("libcudnn.so.*") == [tmp_path / "lib/libcudnn.so.9.14.0"]


def test_headers_are_found_where_builds_look(tmp_path, monkeypatch):
    for name in ("CUDNN_HOME", "CUDNN_PATH", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(probe_build, "ROOT", tmp_path / "no")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "no"))
    monkeypatch.setenv("CXX", "ccache g++")
    before = probe_build.build()
    assert (before.cuda_runtime_h, before.cc, before.cxx) == (None, None, None)
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_runtime.h").touch()
    assert probe_build.build().cuda_runtime_h == str(tmp_path / "include/cuda_runtime.h")
    (tmp_path / "cudnn/include").mkdir(parents=True)
    (tmp_path / "cudnn/include/cudnn.h").touch()
    monkeypatch.setenv("CUDNN_PATH", str(tmp_path / "cudnn"))
    assert probe_build.build().cudnn_h == str(tmp_path / "cudnn/include/cudnn.h")
