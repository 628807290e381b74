"""The command `store certificates`: an authority, and one certificate for scheduler, workers and clients of Dask.

Who has the folder may send work to the cluster, and run it: keep it as you keep a private key.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from dse.errors import ConfigError, Problem, pairs, validate_as
from dse.values import Frozen
from dse.values.units import Integer, typed_integer

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

_NAME = "dse"


class CertificatesRequest(Frozen):
    """Words of the command. days: for which the certificates are valid."""

    days: Annotated[Integer, Field(ge=1, le=3650)]


def certificates(words: Sequence[str]) -> int:
    """`store certificates [out=certificates] [days=365]`: write ca.pem, cert.pem and key.pem into a new folder."""
    options = pairs(words, {"out": "certificates", "days": "365"})
    request = validate_as(CertificatesRequest, {"days": typed_integer(options["days"])}, path="")
    folder = Path(options["out"])
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        way = "choose another name; those who use these certificates would no longer know each other"
        raise ConfigError([Problem("out", "is there already", options["out"], way)]) from None
    make(folder, request.days)
    print(f"written to {folder}/: ca.pem, cert.pem, key.pem, for {request.days} days; who has them may use the cluster")
    flags = f"--tls-ca-file {folder}/ca.pem --tls-cert {folder}/cert.pem --tls-key {folder}/key.pem"
    study = "python -m dse study=<name> executor=dask executor.address=tls://<host>:8786"
    print(f"scheduler  dask scheduler {flags}")
    print(f"worker     dask worker tls://<host>:8786 --nthreads 1 {flags}")
    print(f"study      {study} executor.tls={folder}")
    return 0


def _today() -> datetime:
    """Date and time of day: what certificates are valid by, and nothing else may look at."""
    return datetime.now(UTC)


def expiry(cert: Path) -> str:
    """The day on which a certificate ended, and the hour; "" for one that is valid, or that this cannot tell of."""
    try:
        from cryptography import x509

        ended = x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc
    except (ImportError, ValueError, OSError):
        return ""
    return f"{ended:%Y-%m-%d %H:%M} UTC" if ended < _today() else ""


def make(folder: Path, days: int) -> None:
    """Write ca.pem, cert.pem and key.pem (elliptic curve P-256); the authority's key is thrown away."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _signed(f"{_NAME} authority", authority_key, authority_key, days, is_authority=True)
    cert = _signed(_NAME, key, authority_key, days, is_authority=False)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = {"ca.pem": authority.public_bytes(pem), "cert.pem": cert.public_bytes(pem), "key.pem": private}
    for name, data in files.items():
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)


def _signed(
    name: str, key: EllipticCurvePrivateKey, by: EllipticCurvePrivateKey, days: int, *, is_authority: bool
) -> Certificate:
    """A certificate of a key, signed by the authority's key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, f"{_NAME} authority")
    )
    now = _today()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        .sign(by, hashes.SHA256())
    )
