"""The contract between the stages: `v1` holds the generated code, the modules here its rules in Python.

Nothing here knows what a stage does inside; services and orchestrator alike import it.
"""
