//! Chains of nftables that see what a bridge forwards (include/uapi/linux/netfilter/nf_tables.h,
//! Linux 6.12).

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

/// All there are. Those of IPv4 and of IPv6 count where bridges' frames go `through` them.
///
/// # Errors
/// What the kernel answers, other than that it has no nftables.
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
        match rtnl.list(Raw { kind, bytes: vec![family, 0, 0, 0] }).await {
            Ok(chains) => found.extend(chains.iter().filter_map(|chain| parse(&chain.bytes))),
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOENT)
                ) => {}
            Err(e) => return Err(e).context("the list of nftables' chains"),
        }
    }
    Ok(found)
}

/// A chain, if it hangs where packets are forwarded.
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
    Some(Filter { chain: format!("{family} {} {}", table?, name?), drops })
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
    fn a_chain_counts_where_packets_are_forwarded() {
        let hook =
            |number: u32| nla(NFTA_CHAIN_HOOK, &nla(NFTA_HOOK_HOOKNUM, &number.to_be_bytes()));
        let filter = |drops| Some(Filter { chain: "bridge f c".into(), drops });
        assert_eq!(parse(&chain(&hook(FORWARD), DROP)), filter(true));
        assert_eq!(parse(&chain(&hook(FORWARD), 1)), filter(false));
        assert_eq!(parse(&chain(&hook(1), DROP)), None, "for this machine");
        assert_eq!(parse(&chain(&[], DROP)), None, "no base chain");
        let whole = chain(&hook(FORWARD), DROP);
        (0..whole.len()).for_each(|len| drop(parse(&whole[..len])));
    }
}
