"""The command for pages in the browser: `view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ragen_apo.cli.common import app, console, examples, whole_number

Port = Annotated[int, whole_number(0, 65_535)]


@app.command(help_epilogue=examples("view runs", "view runs/mine --port 8080"))
def view(folder: Path = Path("runs"), *, host: str = "127.0.0.1", port: Port = 0) -> None:
    """Show runs in the browser: curves, live while they train, and episodes turn by turn.

    Only reads; Ctrl-C ends it.

    Args:
        folder: A folder with runs in it, or a run.
        host: The address to listen on. Others than this machine need the token in the address that
            is printed.
        port: The port; 0 takes a free one.
    """
    from ragen_apo.web.extra import require_web

    require_web()
    from ragen_apo.web.serving import serve
    from ragen_apo.web.view.folder import open_folder
    from ragen_apo.web.view.routes import view_routes

    def announce(address: str) -> None:
        console.print(f"open {address} (Ctrl-C ends it)", highlight=False, soft_wrap=True)

    serve(view_routes(open_folder(folder)), host=host, port=port, announce=announce)
