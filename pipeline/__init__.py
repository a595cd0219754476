import os

# Read when torch loads its OpenMP library, so set before anything here imports torch. By default a thread
# that waits for its team spins; when a video encoder has the other core, the team waits for a thread that
# is not running: one 64x64 clip on two busy cores took 11.6 s instead of 1.0 s. Alone it changes nothing.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
