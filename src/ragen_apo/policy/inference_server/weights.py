"""Which weights a policy has, and bringing a server to them.

    model -> identity (base, adapter) -> files -> server, unless it has them already

The base is all weights except those of adapters. A base is loaded from a folder, replaces the
server's own weights, and is labelled by its hash. An adapter is loaded beside it, under a name that
is its hash. So a server itself says which weights it has. A server that was restarted, or that
another run uses, is noticed. An adapter is never loaded twice under one name with other content,
because vLLM would keep prefix caches of the earlier one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ragen_apo.files import directory_written_atomically
from ragen_apo.policy.inference_server.untied import is_tied, require_same_projection, save_untied
from ragen_apo.policy.inference_server.vllm import ServerFacts, VllmServer
from ragen_apo.policy.inference_server.wire import RequestError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.lora import (
    adapter_settings,
    adapter_tensors,
    has_adapters,
    plain_weights,
    save_adapters,
    update_digest,
)

MARK = "ragen-apo-"
"""Begins all labels, adapters and folders of this package."""
_LOADING = f"{MARK}loading"
_LOST = "It was started again, or another run uses it too; give each run servers of its own"


@dataclass(frozen=True)
class Identity:
    """What a server must have for the policy."""

    base: str
    """The label of its weights."""
    adapter: str | None
    """The name of the adapter to sample with."""

    @property
    def salt(self) -> str:
        """Keeps prefix caches of different weights apart."""
        return f"{self.base} {self.adapter or ''}"


@dataclass(frozen=True)
class Brought:
    """A server that has the weights."""

    facts: ServerFacts
    has_changed: bool
    """Whether it had others before."""


class PolicyWeights:
    """The weights of a policy, as they are at a time, for servers."""

    def __init__(self, model: LanguageModel, folder: str | None) -> None:
        """`folder` is where servers read; None for a temporary one, removed with this object."""
        self._model = model
        self._acts = model.adapters and has_adapters(model.model)
        self._folder = None if folder is None else Path(folder).absolute()
        self._written: set[Path] = set()
        """Folders of this object. Others beside them may be another run's, or anybody's."""
        self._frozen_base: str | None = None
        """The label of the weights below adapters, which never change."""

    def identity(self) -> Identity:
        """Of the present weights, all of whose bits are read; those below adapters only once."""
        if not self._acts:
            return Identity(self._base_label(), adapter=None)
        if self._frozen_base is None:
            self._frozen_base = self._base_label()
        digest = hashlib.sha256(json.dumps(adapter_settings(self._model.model)).encode())
        update_digest(digest, adapter_tensors(self._model.model))
        return Identity(self._frozen_base, adapter=f"{MARK}{digest.hexdigest()[:16]}")

    def _base_label(self) -> str:
        digest = hashlib.sha256()
        update_digest(digest, plain_weights(self._model.model, adapters=False))
        return f"{MARK}{digest.hexdigest()[:16]}"

    def bring(self, server: VllmServer, identity: Identity) -> Brought:
        """Gives the server what it lacks of the present weights; their identity is given.

        May be repeated after a failure. `forget_files` belongs after it. Raises RequestError.
        """
        facts = server.facts()
        loaded = [name for name in facts.adapters if name.startswith(MARK)]
        has_base, has_adapter = server.label() == identity.base, identity.adapter in loaded
        if not has_base:
            untie = is_tied(self._model) and server.runs_on_cpu()
            if untie:
                require_same_projection(self._model, facts)
            for name in loaded:  # the server would read their files again
                server.unload_adapter(name)
            loaded, has_adapter = [], False
            # If this breaks off in between, nobody takes the half of it for weights.
            server.set_label(_LOADING)
            base = self._model.without_adapters() if self._acts else self._model
            save = functools.partial(save_untied if untie else LanguageModel.save, base)
            server.load_weights(self._written_folder(identity.base, save))
            server.set_label(identity.base)
        if identity.adapter is not None and not has_adapter:
            save = functools.partial(save_adapters, self._model.model)
            folder = self._written_folder(identity.adapter, save)
            server.load_adapter(identity.adapter, folder)
        for name in loaded:
            if name != identity.adapter:
                server.unload_adapter(name)
        complete = has_base and (has_adapter or identity.adapter is None)
        return Brought(facts, has_changed=not complete)

    def _place(self) -> Path:
        """The folder; the temporary one is made when something is written."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=MARK))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def _written_folder(self, name: str, write: Callable[[Path], None]) -> Path:
        folder = self._place() / name
        if not folder.exists():
            self._written.add(folder)
            with directory_written_atomically(folder) as partial:
                write(partial)
        return folder

    def forget_files(self, identity: Identity) -> None:
        """Removes what no server reads any more: all but the adapter that is in use."""
        for folder in [each for each in self._written if each.name != identity.adapter]:
            shutil.rmtree(folder, ignore_errors=True)
            self._written.discard(folder)


def require_label(server: VllmServer, identity: Identity, *, is_final: bool = False) -> None:
    """Raises RequestError unless the server has had this base ever since `PolicyWeights.bring`."""
    label = server.label()
    if label != identity.base:
        raise RequestError(
            f"/weight_info: the server has weights labelled {label!r:.80}, and was given "
            f"{identity.base!r}",
            advice=_LOST,
            is_final=is_final,
        )


def require_given(server: VllmServer, identity: Identity) -> None:
    """Raises RequestError unless the server has base and adapter; final, as nobody brings them."""
    adapters = server.facts().adapters
    require_label(server, identity, is_final=True)
    if identity.adapter is not None and identity.adapter not in adapters:
        raise RequestError(
            f"/v1/models: the server no longer has the adapter {identity.adapter!r}",
            advice=_LOST,
            is_final=True,
        )
