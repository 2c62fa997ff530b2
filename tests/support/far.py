"""Adapters behind a real HTTP server that fails, stalls and cuts answers as a test wants; and a disk cache for them."""

import contextlib
import shutil
import ssl
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from lora_server.sources.cache import DiskCache
from lora_server.sources.fetch import Fetcher
from lora_server.units import Size
from tests.support.workload import spec_of

SECONDS = 60.0


class Far:
    """`got` counts answers by path, `statuses` are given first, instead of files; while `shut`, weights stop half.
    `moved`: adapters that lie at another URL now; `asked` counts requests."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url, self.directory = url, directory
        self.got: Counter[str] = Counter()
        self.statuses: list[int] = []
        self.moved: dict[str, str] = {}
        self.asked = 0
        self.open, self.stalled = threading.Event(), threading.Event()
        self.open.set()
        self.cut = False

    def put(self, name: str, adapter: Path) -> str:
        """Copy an adapter to the server and return its URL."""
        shutil.rmtree(self.directory / name, ignore_errors=True)
        shutil.copytree(adapter, self.directory / name)
        return f"{self.url}/{name}"


class _Handler(SimpleHTTPRequestHandler):
    far: Far

    def do_HEAD(self) -> None:
        if not self._refused():
            super().do_HEAD()

    def _refused(self) -> bool:
        self.far.asked += 1
        name, _, file = self.path[1:].partition("/")
        if name in self.far.moved:
            self.send_response(302)
            self.send_header("Location", f"{self.far.moved[name]}/{file}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return True
        if self.far.statuses:
            self.send_error(self.far.statuses.pop(0))
            return True
        return False

    def do_GET(self) -> None:
        far = self.far
        if self._refused():
            return
        file = Path(self.translate_path(self.path))
        if file.suffix != ".safetensors" or not file.is_file():
            super().do_GET()
            return
        far.got[self.path] += 1
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            far.stalled.set()
            if far.open.wait(SECONDS) and not far.cut:
                self.wfile.write(content[len(content) // 2 :])

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def far_server(directory: Path, certificate: tuple[Path, Path] | None = None) -> Iterator[Far]:
    directory.mkdir(parents=True, exist_ok=True)
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(directory)))
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "http" if certificate is None else "https"
    far = handler.far = Far(f"{scheme}://127.0.0.1:{server.server_port}", directory)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield far
    finally:
        far.open.set()
        server.shutdown()
        server.server_close()
        thread.join(SECONDS)


def fetcher_of(directory: Path, capacity: int = 1 << 30, kind: str = "mixtral", listed: Sequence[str] = ()) -> Fetcher:
    """Make a fetcher like that of a node's process."""
    return Fetcher(DiskCache(directory, Size(nbytes=capacity)), spec_of(kind), listed=listed)


def size_of(adapter: Path) -> int:
    """Bytes of the files that are fetched."""
    return sum((adapter / name).stat().st_size for name in ("adapter_config.json", "adapter_model.safetensors"))


def left(cache: Path) -> list[str]:
    """List the adapters in a disk cache, complete or not."""
    return sorted(path.name for path in cache.iterdir() if path.is_dir())
