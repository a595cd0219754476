# Before any test imports torch: `pipeline` sets how torch's threads wait, and by default a busy machine
# makes them ten times slower.
import pipeline  # noqa: F401
