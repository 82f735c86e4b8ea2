//! Generates the API from its proto file, with protox, because protoc would have to be installed.

/// Messages that the command line parses directly.
const READ: [&str; 2] = ["CreateJobRequest", "Flow"];
/// Messages that the command line prints as JSON, with their comments as descriptions.
const PRINTED: [&str; 21] = [
    "Fabric",
    "FabricBox",
    "FabricLink",
    "FabricPort",
    "Finding",
    "Job",
    "ListProgramsReply",
    "Port",
    "Program",
    "RankDiagnosis",
    "RankPathTest",
    "Ring",
    "RingDiagnosis",
    "RingPosition",
    "RingState",
    "ShowSlotsReply",
    "Slot",
    "SlotSnapshot",
    "Spread",
    "SpreadFlow",
    "SpreadUplink",
];
/// What serde must know of their fields. The command line adds the skipped ones in other forms.
const FIELDS: [(&str, &str); 35] = [
    ("Fabric.ports", "skip"),
    ("Fabric.jobs", "skip"),
    ("FabricBox.hosts", "skip"),
    ("FabricBox.cpus", "skip"),
    ("FabricLink.measured", r#"serialize_with = "crate::arguments::unless_zero""#),
    ("FabricPort.rx_rate", "skip"),
    ("FabricPort.tx_rate", "skip"),
    ("Finding.behind", "skip"),
    ("Finding.idle", "skip"),
    ("Job.state", "skip"),
    ("Job.flows", "skip"),
    ("Job.token", "skip"),
    ("Job.heartbeat_ms", "skip"),
    ("Job.in_band", "skip"),
    ("Job.in_band_token", "skip"),
    ("Job.claims", "skip"),
    ("Job.unclaimed", "skip"),
    ("Job.refusals", "skip"),
    ("Job.members", r#"skip_serializing_if = "Vec::is_empty""#),
    ("Job.uplink", r#"skip_serializing_if = "String::is_empty""#),
    ("Job.dtype", r#"skip_serializing_if = "Option::is_none""#),
    ("Job.lsb", r#"skip_serializing_if = "Option::is_none""#),
    ("Job.min_ranks", "skip"),
    ("Job.max_ranks", "skip"),
    ("Port.hosts", "skip"),
    ("Port.rate", "skip"),
    ("Port.neighbour", "skip"),
    ("Port.blocked", "skip"),
    ("Program.kind", r#"rename = "type""#),
    ("Program.xlated_bytes", r#"rename = "bytes_xlated""#),
    ("Program.jited_bytes", r#"rename = "bytes_jited""#),
    ("Program.memory", r#"rename = "bytes_memlock""#),
    ("Program.verified_instructions", r#"rename = "verified_insns""#),
    ("Program.runs", r#"rename = "run_cnt""#),
    ("Program.run_ns", r#"rename = "run_time_ns""#),
];
/// Options of what the command line parses, besides names and comments.
const OPTIONS: [(&str, &str); 26] = [
    ("CreateJobRequest.ranks", r#"value_name = "N""#),
    (
        "CreateJobRequest.mtu",
        r#"default_value = "auto", hide_default_value = true, value_name = "BYTES", value_parser = mtu"#,
    ),
    (
        "CreateJobRequest.message_size",
        r#"default_value = netsum_common::defaults::MESSAGE_SIZE, value_name = "BYTES", value_parser = bytes"#,
    ),
    (
        "CreateJobRequest.window",
        r#"default_value_t = netsum_common::defaults::WINDOW, value_name = "W""#,
    ),
    ("CreateJobRequest.rings", r#"default_value_t = 1, value_name = "R""#),
    ("CreateJobRequest.icrc", r#"default_value = "verify""#),
    ("CreateJobRequest.order", r#"default_value = "auto""#),
    ("CreateJobRequest.in_band", ""),
    ("CreateJobRequest.token", r#"default_value = """#),
    (
        "CreateJobRequest.tenant",
        r#"default_value = netsum_common::defaults::TENANT, value_name = "TENANT""#,
    ),
    ("CreateJobRequest.members", r#"default_value = "", value_name = "RANKS""#),
    ("CreateJobRequest.groups", r#"default_value = "", value_name = "RANKS,..""#),
    ("CreateJobRequest.uplink", r#"default_value = "", value_name = "IFNAME""#),
    ("CreateJobRequest.ring_order", r#"default_value = "", value_name = "RANK,..""#),
    ("CreateJobRequest.host_ring_fallback", ""),
    (
        "CreateJobRequest.min_ranks",
        r#"default_value_t = 0, hide_default_value = true, value_name = "MIN""#,
    ),
    ("CreateJobRequest.dtype", r#"default_value = "i32""#),
    (
        "CreateJobRequest.lsb",
        r#"default_value = "", hide_default_value = true, allow_negative_numbers = true, value_name = "EXP""#,
    ),
    ("Flow.ring", r#"value_parser = number, value_name = "R""#),
    ("Flow.rank", r#"value_parser = number, value_name = "K""#),
    ("Flow.port", r#"value_name = "IFNAME""#),
    ("Flow.src", r#"value_name = "IP""#),
    ("Flow.dst", r#"value_name = "IP""#),
    ("Flow.qpn", "value_parser = number"),
    ("Flow.psn", "value_parser = number"),
    ("Flow.src_mac", r#"default_value = "", value_name = "MAC""#),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["proto/netsum.proto"], ["proto"])?;
    let mut builder = tonic_prost_build::configure();
    if cfg!(feature = "cli") {
        for message in PRINTED {
            let derive = "#[derive(serde::Serialize, schemars::JsonSchema)]";
            builder = builder.type_attribute(message, derive);
        }
        for (field, option) in FIELDS {
            builder = builder.field_attribute(field, format!("#[serde({option})]"));
        }
        builder =
            builder.field_attribute("FabricLink.measured", r#"#[schemars(with = "Option<u64>")]"#);
        for message in READ {
            builder = builder.type_attribute(message, "#[derive(clap::Args)]");
        }
        for (field, option) in OPTIONS {
            builder = builder.field_attribute(field, format!("#[arg(long, {option})]"));
        }
        builder = builder.field_attribute("Flow.seen", "#[arg(skip)]");
    }
    builder.compile_fds(descriptors)?;
    Ok(())
}
