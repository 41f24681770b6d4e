"""The supervised start of the embedded policy: scripted demonstrations, imitated once."""
