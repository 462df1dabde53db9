"""Studies, audits, figures and reports, from numbers that others computed."""
