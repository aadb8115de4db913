"""The pager and what it decides with. Knows torch for dtypes and byte views only: never nn, distributed or cuda."""
