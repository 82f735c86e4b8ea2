//! Finds the ports that hosts are behind. Many ranks join at once: their hosts are looked up
//! together, at all boxes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use netsum_api::v1 as api;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::client::Client;
use crate::config::End;

/// Lookups within this time are sent together.
const GATHER: Duration = Duration::from_millis(5);
/// Time to wait for a second box that has the host: boxes answer at once.
pub const SECOND_QUERY_DELAY: Duration = Duration::from_millis(50);

/// Looks up hosts.
pub struct Hosts {
    questions: UnboundedSender<Question>,
}

struct Question {
    mac: String,
    /// Its last port: a host that is still there is not elsewhere.
    was: Option<End>,
    links: Arc<BTreeSet<End>>,
    answer: oneshot::Sender<BTreeSet<End>>,
}

/// A host that is being looked up.
#[derive(Default)]
struct HostLookup {
    ends: BTreeSet<End>,
    /// When it was found first.
    found: Option<Instant>,
    questions: Vec<Question>,
}

impl Hosts {
    /// Looks up hosts at these boxes.
    pub fn new(boxes: Vec<(String, Client)>, patience: Duration) -> Self {
        let (questions, requests) = unbounded_channel();
        tokio::spawn(answer(boxes, patience, requests));
        Self { questions }
    }

    /// All ports on which a bridge has seen this MAC address, except `links`, those towards other
    /// boxes.
    pub async fn behind(
        &self,
        mac: String,
        was: Option<End>,
        links: Arc<BTreeSet<End>>,
    ) -> BTreeSet<End> {
        let (answer, answered) = oneshot::channel();
        let _ = self.questions.send(Question { mac, was, links, answer });
        answered.await.unwrap_or_default()
    }
}

/// Answers lookups until all senders are gone.
async fn answer(
    boxes: Vec<(String, Client)>,
    patience: Duration,
    mut requests: UnboundedReceiver<Question>,
) {
    while let Some(first) = requests.recv().await {
        sleep(GATHER).await;
        let mut lookups: BTreeMap<String, HostLookup> = BTreeMap::new();
        let others = std::iter::from_fn(|| requests.try_recv().ok());
        for question in std::iter::once(first).chain(others) {
            lookups.entry(question.mac.clone()).or_default().questions.push(question);
        }
        let mut answers = JoinSet::new();
        let macs: Vec<String> = lookups.keys().cloned().collect();
        for (name, client) in &boxes {
            let (name, mut client) = (name.clone(), client.clone());
            let request = api::FindHostsRequest { macs: macs.clone() };
            answers.spawn(async move {
                let reply = timeout(patience, client.agent.find_hosts(request)).await.ok()?.ok()?;
                Some((name, reply.into_inner().hosts))
            });
        }
        tokio::spawn(gather(answers, lookups));
    }
}

/// Returns each answer as soon as it is known.
async fn gather(
    mut answers: JoinSet<Option<(String, Vec<api::FabricHost>)>>,
    mut lookups: BTreeMap<String, HostLookup>,
) {
    while !lookups.is_empty() {
        let all_are_there = match timeout(SECOND_QUERY_DELAY, answers.join_next()).await {
            Ok(None) => true,
            Ok(Some(Ok(Some((of, hosts))))) => {
                for api::FabricHost { mac, port } in hosts {
                    let end = End { of: of.clone(), port };
                    let Some(host) = lookups.get_mut(&mac) else { continue };
                    if !host.questions.iter().any(|q| q.links.contains(&end)) {
                        host.ends.insert(end);
                        host.found.get_or_insert_with(Instant::now);
                    }
                }
                false
            }
            _ => false,
        };
        let is_known = |host: &HostLookup| {
            let late = host.found.is_some_and(|found| found.elapsed() >= SECOND_QUERY_DELAY);
            let as_before =
                |q: &Question| q.was.as_ref().is_some_and(|was| host.ends.contains(was));
            all_are_there || late || host.ends.len() == 1 && host.questions.iter().all(as_before)
        };
        for (_, host) in lookups.extract_if(.., |_, host| is_known(host)) {
            for question in host.questions {
                // The caller may have gone.
                let _ = question.answer.send(host.ends.clone());
            }
        }
    }
}
