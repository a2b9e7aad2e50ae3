"""Python's standard library as a source: about 3 MB of real text on every machine. A module is a unit."""

from __future__ import annotations

import hashlib
import logging
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.units import Corpus, DocumentCounts, Unit

log = logging.getLogger(__name__)

# Pure-Python modules that are in all of CPython 3.11 to 3.14, also in Debian's split packages.
TRAIN_MODULES = """
_collections_abc.py _pydecimal.py _pyio.py _strptime.py _weakrefset.py abc.py argparse.py ast.py
asyncio/base_events.py asyncio/events.py asyncio/futures.py asyncio/locks.py asyncio/queues.py
asyncio/selector_events.py asyncio/sslproto.py asyncio/streams.py asyncio/subprocess.py asyncio/tasks.py
asyncio/unix_events.py base64.py bdb.py bz2.py calendar.py cmd.py code.py codecs.py collections/__init__.py
compileall.py concurrent/futures/_base.py concurrent/futures/process.py concurrent/futures/thread.py configparser.py
contextlib.py copy.py csv.py dataclasses.py dis.py doctest.py email/_header_value_parser.py email/charset.py
email/generator.py email/header.py email/headerregistry.py email/message.py email/utils.py enum.py filecmp.py
fileinput.py fractions.py ftplib.py functools.py getopt.py gettext.py glob.py graphlib.py gzip.py hmac.py
html/parser.py http/client.py http/cookiejar.py http/cookies.py http/server.py imaplib.py importlib/_bootstrap.py
importlib/_bootstrap_external.py inspect.py ipaddress.py json/decoder.py json/encoder.py locale.py
logging/__init__.py logging/config.py logging/handlers.py lzma.py mimetypes.py modulefinder.py
multiprocessing/connection.py multiprocessing/managers.py multiprocessing/pool.py multiprocessing/queues.py netrc.py
ntpath.py numbers.py operator.py optparse.py os.py pdb.py pickle.py pickletools.py pkgutil.py platform.py
plistlib.py poplib.py posixpath.py pprint.py pstats.py pyclbr.py pydoc.py queue.py random.py reprlib.py runpy.py
sched.py selectors.py shelve.py shlex.py shutil.py smtplib.py socket.py socketserver.py ssl.py subprocess.py
symtable.py tempfile.py threading.py timeit.py tokenize.py trace.py traceback.py tracemalloc.py types.py typing.py
unittest/case.py unittest/mock.py urllib/parse.py urllib/request.py uuid.py wave.py weakref.py webbrowser.py
xml/dom/minidom.py xmlrpc/client.py zipimport.py zoneinfo/_zoneinfo.py
""".split()  # noqa: SIM905  # a list of strings would be four screens long
VAL_MODULES = ["bisect.py", "difflib.py", "heapq.py", "mailbox.py", "statistics.py", "tarfile.py", "textwrap.py"]


@dataclass
class StdlibSource:
    """The modules above, found through `sysconfig`. Tests give another `folder`."""

    folder: str = sysconfig.get_path("stdlib")
    waits: tuple[float, ...] = ()  # a local read that fails once fails again

    def corpus(self) -> Corpus:
        """Return one unit a module.

        Raises:
            UserError: half of the modules or more are missing, as in a Python installed without its source.
        """
        train, val = ([unit for name in names if (unit := self._unit(name))] for names in (TRAIN_MODULES, VAL_MODULES))
        missing = len(TRAIN_MODULES) + len(VAL_MODULES) - len(train) - len(val)
        if len(train) < len(TRAIN_MODULES) / 2 or not val:
            raise UserError.of(
                f"this Python has no source of its standard library: {missing} of "
                f"{len(TRAIN_MODULES) + len(VAL_MODULES)} modules are not in {self.folder}",
                "use a CPython installed with its library's source, or text of your own: data=text_files",
            )
        if missing:
            log.info("data: %d modules are not part of this Python's library and are left out", missing)
        return Corpus(train, val, {"kind": "stdlib", "modules": len(train) + len(val)})

    def read(self, unit: Unit, counts: DocumentCounts) -> Iterator[bytes]:
        """Return the module's source, as one document."""
        yield Path(unit.path).read_bytes()

    def is_current(self, unit: Unit) -> bool:
        """Return whether the module still has the content that it had at the start."""
        return unit.name.endswith(f"@{_content(Path(unit.path))}")

    def _unit(self, name: str) -> Unit | None:
        path = Path(self.folder, name)
        return Unit(f"stdlib/{name}@{_content(path)}", str(path)) if path.is_file() else None


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]  # differs between releases of Python
