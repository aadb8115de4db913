"""What tools/gpu_check measures: one module a subject, one function a measurement, each in a process of its own."""
