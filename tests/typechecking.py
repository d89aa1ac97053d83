"""The type checker that tests put on the package: beartype, for which an int is a float too, as for all checkers."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
