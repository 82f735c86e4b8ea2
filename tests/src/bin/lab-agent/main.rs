//! The first process in a VM of the lab: gets the machine ready, then runs what the lab asks for.

mod serve;
mod start;

fn main() -> anyhow::Result<()> {
    if std::process::id() != 1 {
        anyhow::bail!("this is the first process of a VM in the lab, and no program to be run by hand");
    }
    // An error ends the first process, hence the VM; the lab shows its console.
    start::up()?;
    serve::serve()
}
