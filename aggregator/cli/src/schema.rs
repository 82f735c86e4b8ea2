//! The schemas of the printed JSON, generated from the printed types. `cargo xtask dist --schema`
//! writes them to `netsum/schema`; a test compares them.

use netsum_api::v1 as api;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::Value;

use super::check::CheckReport;
use super::diagnosis::Diagnosis;
use super::fabric::Probe;
use super::path_test::PathTest;
use super::plan::Plans;
use super::simulation::Simulation;
use super::tenants::Tenant;
use super::topology::Topology;
use super::trace::Packet;
use super::view::{Error, Flow, Job, Rates, Stats};

/// A schema, and the file that has it.
#[derive(Debug)]
pub struct Schema {
    /// The file in `netsum/schema`.
    pub file: &'static str,
    /// JSON Schema, draft 2020-12.
    pub schema: Value,
}

fn of<T: JsonSchema>(file: &'static str, commands: &str) -> Schema {
    let generator: SchemaGenerator =
        SchemaSettings::draft2020_12().for_serialize().into_generator();
    let mut schema = generator.into_root_schema_for::<T>();
    schema.insert("title".into(), commands.into());
    Schema { file, schema: schema.to_value() }
}

pub fn all() -> Vec<Schema> {
    vec![
        of::<Job>("job.json", "netsum -j job create, job show JOB, flow add"),
        of::<Vec<Job>>("jobs.json", "netsum -j job show"),
        of::<Vec<api::Ring>>("rings.json", "netsum -j ring show"),
        of::<Vec<Flow>>("flows.json", "netsum -j flow show"),
        of::<api::ShowSlotsReply>("slots.json", "netsum -j slot show JOB"),
        of::<Vec<api::Port>>("ports.json", "netsum -j port show"),
        of::<Stats>("stats.json", "netsum -j stats: counters by name"),
        of::<Rates>("rates.json", "netsum -j stats --interval TIME: one of these in each line"),
        of::<Vec<Tenant>>("tenants.json", "netsum -j tenant show"),
        of::<api::Spread>("spread.json", "netsum -j spread show"),
        of::<api::Fabric>("fabric.json", "netsum -j fabric show"),
        of::<super::trees::Job>("fabric-job.json", "netsum -j fabric job show"),
        of::<Vec<Probe>>("probe.json", "netsum -j fabric probe"),
        of::<Topology>("topology.json", "netsum -j fabric topology"),
        of::<api::ListProgramsReply>("progs.json", "netsum -j prog show"),
        of::<Diagnosis>("diagnosis.json", "netsum -j diagnose JOB, fabric diagnose JOB"),
        of::<PathTest>("path.json", "netsum -j path JOB"),
        of::<Packet>("trace.json", "netsum -j trace: one of these in each line"),
        of::<Simulation>("simulation.json", "netsum -j simulate FILE"),
        of::<Plans>("plan.json", "netsum -j plan --topology FILE"),
        of::<CheckReport>("check.json", "netsum -j check"),
        of::<Error>("error.json", "netsum -j, any command that fails"),
    ]
}

/// The text of a schema's file.
pub fn text(schema: &Value) -> String {
    format!("{schema:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_what_is_printed() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../netsum/schema");
        let mut files: Vec<String> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        for Schema { file, schema } in all() {
            let found = std::fs::read_to_string(folder.join(file)).unwrap_or_default();
            assert!(found == text(&schema), "{file} is out of date: cargo xtask dist --schema");
            files.retain(|f| f != file);
        }
        assert!(files.is_empty(), "files without a command: {files:?}");
    }
}
