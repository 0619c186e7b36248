"""The exceptions that Moonpool raises: operating conditions, each with what to do next."""

from __future__ import annotations


class MoonpoolError(Exception):
    """The root of all of Moonpool's own exceptions."""


class ConfigError(MoonpoolError):
    """An option is unknown, can't be parsed, or doesn't fit this machine."""


class InvalidRequest(MoonpoolError, ValueError):
    """A single call was given a key, value or target that can't be used; the text names the limit."""


class NodeUnavailable(MoonpoolError, ConnectionError):
    """There is no node to talk to (not started, killed, or not answering). Engines treat it as a miss."""


class VersionMismatch(NodeUnavailable):
    """Client and node are more than one minor protocol version apart."""


class FolderError(MoonpoolError):
    """The folder can't be used: owner, mode, a link, another node's lock, or files of another version."""


class KeySpaceConflict(MoonpoolError):
    """A key-space digest is declared already with another description."""


class IntegrityError(MoonpoolError):
    """Bytes differ from their checksum."""


class ReadOnly(MoonpoolError):
    """A writing call on a client that was opened with `read_only=True`."""


class Closed(MoonpoolError):
    """The client, view or reservation has been closed."""


class RequestTimeout(NodeUnavailable, TimeoutError):
    """The node didn't answer within the client's `timeout_s`. Until it does, further calls fail at once."""


class Cancelled(MoonpoolError):
    """The call was cancelled while it waited; what it had been granted has been given back."""


class RemoteError(MoonpoolError):
    """The node refused a request; the text is the node's."""


class ProtocolError(MoonpoolError):
    """A peer sent something that is not Moonpool's protocol."""
