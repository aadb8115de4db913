"""The measurements of tools/gpu_check: one module a subject, one function a measurement, each in a process of its own."""
