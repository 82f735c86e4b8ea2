//! Workers over TLS, with certificates made here: which clients are admitted, and the errors of the
//! others. No root, no BPF.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use common::Daemon;
use common::authority::Authority;
use netsum_agent::config;
use netsum_controller::{limiter::Limits, tls};
use netsum_worker::{Bootstrap, CommConfig, Communicator, Tls};

/// An address of 127.0.0.0/8 that no other test and no other test run uses at the same time.
fn address(test: u8) -> IpAddr {
    let pid = std::process::id();
    Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, 240 + test).into()
}

/// The daemon's error for a rank that TLS and the token have admitted: the loopback interface has
/// no MAC address.
const PAST_TLS: &str = "there has no MAC address";

/// Connects as a rank; returns the error.
async fn refused(d: &Daemon, test: u8, tls: Option<Tls>) -> String {
    let address_of_daemon = d.address.trim_start_matches("http://").to_owned();
    let bootstrap = Bootstrap::Controller {
        address: address_of_daemon,
        job: "train".into(),
        token: "sesame".into(),
    };
    let config = CommConfig { tls, ..CommConfig::new(0, 2, address(test), bootstrap) };
    let connect = tokio::task::spawn_blocking(|| Communicator::connect(config).map(drop));
    connect.await.unwrap().expect_err("it gets in").to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_need_a_certificate_of_the_right_authority() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let theirs = Authority::new(folder.path(), "theirs");
    let (cert, key) = ours.sign("box", "127.0.0.1", false);
    let files = tls::Tls { cert, key, client_ca: Some(ours.ca()) };
    let d =
        Daemon::with(Limits::default(), Some(tls::server_config("listen.tls", &files).unwrap()))
            .await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();

    let good = |name: &str| Tls { ca: ours.ca(), identity: Some(ours.sign(name, "worker", false)) };
    let error = refused(&d, 0, Some(good("rank0"))).await;
    assert!(error.contains(PAST_TLS), "{error}");

    let with = |identity| Some(Tls { ca: ours.ca(), identity });
    let foreign = theirs.sign("foreign", "worker", false);
    let expired = ours.sign("expired", "worker", true);
    for (test, tls, expected) in [
        (1, with(None), "refuses this worker's certificate (none was given): it asks for one"),
        (
            2,
            with(Some(foreign)),
            "foreign.crt): it is not signed by the authority that the controller trusts",
        ),
        (3, with(Some(expired)), "expired.crt): it has expired"),
        (
            4,
            Some(Tls { ca: theirs.ca(), ..good("rank0") }),
            "the controller's certificate is not signed by an authority in",
        ),
    ] {
        let error = refused(&d, test, tls).await;
        // If the alert stays unread, see `suspicion`, the error names the certificate's owner, but
        // not the reason.
        let (whose, _) = expected.split_once(':').unwrap_or((expected, ""));
        let unread = error.contains("perhaps the controller refuses this worker's certificate (");
        assert!(error.contains(expected) || unread && error.contains(whose), "{error}");
    }
    let error = refused(&d, 5, None).await;
    assert!(error.contains("the controller may require TLS"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_with_a_foreign_certificate_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    for (test, name, host, expired, expected) in [
        (0, "other", "10.9.9.9", false, "certificate not valid for name"),
        (1, "old", "127.0.0.1", true, "certificate expired"),
    ] {
        let (cert, key) = ours.sign(name, host, expired);
        let files = tls::Tls { cert, key, client_ca: None };
        let d = Daemon::with(
            Limits::default(),
            Some(tls::server_config("listen.tls", &files).unwrap()),
        )
        .await;
        d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
        let error = refused(&d, 6 + test, Some(Tls { ca: ours.ca(), identity: None })).await;
        assert!(
            error.contains("the controller's certificate is refused") && error.contains(expected),
            "{error}"
        );
    }
    // A daemon without any TLS.
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    let error = refused(&d, 4, Some(Tls { ca: ours.ca(), identity: None })).await;
    assert!(error.contains("the controller does not speak TLS on this port"), "{error}");
}

#[test]
fn errors_name_the_file_that_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let (cert, key) = ours.sign("box", "127.0.0.1", false);
    let (other_cert, _) = ours.sign("other", "127.0.0.1", false);
    let broken = folder.path().join("broken.pem");
    std::fs::write(&broken, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        .unwrap();
    let missing = folder.path().join("missing.pem");
    for (cert, key, ca, expected) in [
        (&missing, &key, None, "missing.pem: cannot be read: No such file"),
        (&cert, &missing, None, "missing.pem: cannot be read"),
        (&key, &key, None, "box.key: not a certificate in PEM form: it contains no certificate"),
        (&cert, &cert, None, "box.crt: not a private key in PEM form"),
        (&other_cert, &key, None, "box.key: not the key of the certificate in"),
        (&broken, &key, None, "broken.pem: not a certificate"),
        (&cert, &key, Some(&key), "listen.tls.client-ca"),
        (&cert, &key, Some(&broken), "broken.pem: not a certificate"),
    ] {
        let files = tls::Tls { cert: cert.clone(), key: key.clone(), client_ca: ca.cloned() };
        let error = format!("{:#}", tls::server_config("listen.tls", &files).expect_err(expected));
        assert!(error.contains(expected) && error.starts_with("listen.tls"), "{error}");
    }
}

/// Runs a manager with this certificate and authority; returns the number of the box's ports that
/// it sees, or `None` if it is not admitted.
async fn look(address: &str, cert: &Path, key: &Path, ca: &Path) -> Option<usize> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fabric.toml");
    let text = format!(
        "[tls]\ncert = {cert:?}\nkey = {key:?}\nca = {ca:?}\n[[box]]\nname = \"a\"\naddress = \
         \"https://{address}\"\n"
    );
    std::fs::write(&file, text).unwrap();
    let boxes =
        netsum_fabric::boxes::Boxes::new(&netsum_fabric::config::Config::read(&file).unwrap())
            .unwrap();
    boxes.poll().await.get("a").map(|seen| seen.ports.len())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_takes_orders_of_its_own_fabrics_manager_alone() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let theirs = Authority::new(folder.path(), "theirs");
    let (cert, key) = ours.sign("box", "127.0.0.1", false);
    let d = Daemon::start().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let fabric = config::Fabric { address, cert, key, ca: ours.ca() };
    let tls = netsum_agent::listen::manager_tls(&fabric).unwrap();
    let network =
        netsum_agent::network::Network::Kernel(netsum_agent::netlink::Netlink::open().unwrap());
    let task =
        tokio::spawn(netsum_agent::listen::serve_manager(d.shared.clone(), network, listener, tls));
    let address = address.to_string();

    let (cert, key) = ours.sign("manager", "manager", false);
    assert_eq!(look(&address, &cert, &key, &ours.ca()).await, Some(3));
    // A box of another fabric gets no orders.
    assert_eq!(look(&address, &cert, &key, &theirs.ca()).await, None);
    for (cert, key) in [theirs.sign("manager", "manager", false), ours.sign("old", "manager", true)]
    {
        assert_eq!(look(&address, &cert, &key, &ours.ca()).await, None);
    }
    task.abort();
}
