"""Graders, and what was found out about them."""

from sqlalchemy import Index, Table, UniqueConstraint

from bloomery.store.rows.columns import integer, metadata, string

grader = Table(
    "grader",
    metadata,
    string("id", key=True),
    string("project"),
    string("name"),
    integer("number"),
    string("hash"),  # of what decides its scores
    string("spec"),  # JSON
    integer("created_us"),
    string("waiver", null=True),  # JSON: why attacks of it count for nothing, and who says so
    UniqueConstraint("project", "name", "number", name="grader_number"),
    UniqueConstraint("project", "name", "hash", name="grader_once"),
)

calibration = Table(
    "calibration",
    metadata,
    string("id", key=True),
    string("project"),
    string("grader_hash"),
    string("card"),  # JSON
    integer("created_us"),
    Index("calibration_by_grader", "project", "grader_hash", "created_us"),
)

grader_attack = Table(
    "grader_attack",
    metadata,
    string("id", key=True),
    string("project"),
    string("grader_hash"),
    string("manifest"),  # of the rows' version
    string("split"),
    string("report"),  # JSON
    integer("created_us"),
    Index("grader_attack_by_grader", "project", "grader_hash", "created_us"),
)
