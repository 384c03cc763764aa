"""Seeds of single random draws, derived from a seed of the configuration."""

from hashlib import blake2b


def derived_seed(seed: int, purpose: str, *place: int) -> int:
    """Return the seed of the draws of one purpose at one place, such as a step, 0 <= result < 2**63.

    A hash: a resumed run repeats its draws, any two places and purposes have draws of their own, and every integer is
    a valid seed.

    >>> derived_seed(42, "gsm8k/0/17", 3, 0)  # resumed runs rely on it after an upgrade
    4272670318136131685
    """
    identity = "/".join(map(str, (seed, purpose, *place))).encode()
    return int.from_bytes(blake2b(identity, digest_size=8).digest(), "big") >> 1
