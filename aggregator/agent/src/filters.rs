//! The nftables chains that see what a bridge forwards (include/uapi/linux/netfilter/nf_tables.h,
//! Linux 6.12), and those of iptables-legacy, which nftables does not know.

use anyhow::{Context as _, Result};
use netsum_core::bridging::Filter;
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use super::link::{attribute, text};
use super::rtnl::{Raw, Rtnl};

const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_GETCHAIN: u16 = 4;
/// Bytes of `struct nfgenmsg`.
const HEADER: usize = 4;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFPROTO_INET: u8 = 1;
const NFPROTO_BRIDGE: u8 = 7;
/// `NF_BR_FORWARD` and `NF_INET_FORWARD`; `NF_DROP`.
const FORWARD: u32 = 2;
const DROP: u32 = 0;

/// Lists all such chains. `through` says whether bridges pass frames to chains of IPv4 and of IPv6;
/// otherwise these are left out.
///
/// # Errors
/// The kernel's error, unless it says that it has no nftables.
pub async fn filters(through: [bool; 2]) -> Result<Vec<Filter>> {
    let rtnl = Rtnl::open(NETLINK_NETFILTER).context("netfilter")?;
    let kind = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETCHAIN;
    let mut found = Vec::new();
    let [ip, ip6] = through;
    let families = [
        (NFPROTO_BRIDGE, true),
        (NFPROTO_INET, ip || ip6),
        (libc::AF_INET as u8, ip),
        (libc::AF_INET6 as u8, ip6),
    ];
    for (family, _) in families.into_iter().filter(|(_, counts)| *counts) {
        match rtnl.dump(Raw { kind, bytes: vec![family, 0, 0, 0] }).await {
            Ok(chains) => found.extend(chains.iter().filter_map(|chain| parse(&chain.bytes))),
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOENT)
                ) => {}
            Err(e) => return Err(e).context("the list of nftables' chains"),
        }
    }
    let names = [("iptables", "ip_tables_names", ip), ("ip6tables", "ip6_tables_names", ip6)];
    for (tool, names, _) in names.into_iter().filter(|(.., counts)| *counts) {
        // The file does not exist if the kernel lacks iptables, or if it was never used.
        let tables = std::fs::read_to_string(format!("/proc/self/net/{names}")).unwrap_or_default();
        found.extend(legacy(tool, &tables));
    }
    Ok(found)
}

/// The chains of these tables that see forwarded packets. Only iptables itself knows their rules
/// and policies.
fn legacy(tool: &str, tables: &str) -> Vec<Filter> {
    let forwards = |table: &&str| ["filter", "mangle", "security"].contains(table);
    let filter = |table: &str| Filter {
        chain: format!("FORWARD of table {table} of {tool}-legacy"),
        list: format!("{tool}-legacy -t {table} -S FORWARD"),
        drops: false,
    };
    tables.lines().filter(forwards).map(filter).collect()
}

/// Parses a chain; `None` unless it hooks into forwarding.
fn parse(message: &[u8]) -> Option<Filter> {
    let (header, all) = message.split_at_checked(HEADER)?;
    let number = |of: &[u8], kind| Some(u32::from_be_bytes(attribute(of, kind)?.try_into().ok()?));
    (number(attribute(all, NFTA_CHAIN_HOOK)?, NFTA_HOOK_HOOKNUM)? == FORWARD).then_some(())?;
    let family = match header[0] {
        NFPROTO_BRIDGE => "bridge",
        NFPROTO_INET => "inet",
        family if family == libc::AF_INET as u8 => "ip",
        _ => "ip6",
    };
    let [table, name] =
        [NFTA_CHAIN_TABLE, NFTA_CHAIN_NAME].map(|kind| attribute(all, kind).map(text));
    let drops = number(all, NFTA_CHAIN_POLICY) == Some(DROP);
    let chain = format!("{family} {} {}", table?, name?);
    Some(Filter { list: format!("nft list chain {chain}"), chain, drops })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nla(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (value.len() as u16 + 4).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn chain(hook: &[u8], policy: u32) -> Vec<u8> {
        let names = [nla(NFTA_CHAIN_TABLE, b"f\0"), nla(NFTA_CHAIN_NAME, b"c\0")].concat();
        [
            &[NFPROTO_BRIDGE, 0, 0, 0],
            &names[..],
            hook,
            &nla(NFTA_CHAIN_POLICY, &policy.to_be_bytes()),
        ]
        .concat()
    }

    #[test]
    fn tables_of_iptables_legacy_count_where_they_see_what_is_forwarded() {
        let all = legacy("iptables", "raw\nnat\nmangle\nfilter\n");
        let all: Vec<_> = all.iter().map(|f| (&*f.chain, &*f.list)).collect();
        assert_eq!(
            all,
            [
                (
                    "FORWARD of table mangle of iptables-legacy",
                    "iptables-legacy -t mangle -S FORWARD"
                ),
                (
                    "FORWARD of table filter of iptables-legacy",
                    "iptables-legacy -t filter -S FORWARD"
                ),
            ]
        );
        assert_eq!(legacy("ip6tables", ""), []);
    }

    #[test]
    fn a_chain_counts_where_packets_are_forwarded() {
        let hook =
            |number: u32| nla(NFTA_CHAIN_HOOK, &nla(NFTA_HOOK_HOOKNUM, &number.to_be_bytes()));
        let (chain_, list) = ("bridge f c".to_owned(), "nft list chain bridge f c".to_owned());
        let filter = |drops| Some(Filter { chain: chain_.clone(), list: list.clone(), drops });
        assert_eq!(parse(&chain(&hook(FORWARD), DROP)), filter(true));
        assert_eq!(parse(&chain(&hook(FORWARD), 1)), filter(false));
        assert_eq!(parse(&chain(&hook(1), DROP)), None, "for this machine");
        assert_eq!(parse(&chain(&[], DROP)), None, "no base chain");
        let whole = chain(&hook(FORWARD), DROP);
        (0..whole.len()).for_each(|len| drop(parse(&whole[..len])));
    }
}
