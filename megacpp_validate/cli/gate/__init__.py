"""The verbs that decide and show: release gate, loss gate, policy, pipelines, report, history."""
