//! Types and functions of libibverbs. Made by `cargo xtask verbs-bindings` with bindgen 0.73.2 from
//! infiniband/verbs.h of Debian bookworm's rdma-core, under the second of the licenses that its notice names:
//!
//! Copyright (c) 2004, 2005 Topspin Communications.  All rights reserved.
//! Copyright (c) 2004, 2011-2012 Intel Corporation.  All rights reserved.
//! Copyright (c) 2005, 2006, 2007 Cisco Systems, Inc.  All rights reserved.
//! Copyright (c) 2005 PathScale, Inc.  All rights reserved.
//! Copyright (c) 2020 Intel Corporation.  All rights reserved.
//!
//! This software is available to you under a choice of one of two
//! licenses.  You may choose to be licensed under the terms of the GNU
//! General Public License (GPL) Version 2, available from the file
//! COPYING in the main directory of this source tree, or the
//! OpenIB.org BSD license below:
//!
//! Redistribution and use in source and binary forms, with or
//! without modification, are permitted provided that the following
//! conditions are met:
//!
//! - Redistributions of source code must retain the above
//! copyright notice, this list of conditions and the following
//! disclaimer.
//!
//! - Redistributions in binary form must reproduce the above
//! copyright notice, this list of conditions and the following
//! disclaimer in the documentation and/or other materials
//! provided with the distribution.
//!
//! THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND,
//! EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
//! MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
//! NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS
//! BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN
//! ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
//! CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
//! SOFTWARE.
#![allow(dead_code, missing_docs, non_camel_case_types, unsafe_op_in_unsafe_fn)]
#![allow(clippy::all, clippy::undocumented_unsafe_blocks, reason = "generated")]

use libc::{pthread_cond_t, pthread_mutex_t};

#[derive(PartialEq, Eq, Copy, Clone, Debug, Hash)]
#[repr(C, align(8))]
pub struct __BindgenOpaqueArray8<T>(pub T);
impl<T: Copy + Default, const N: usize> Default for __BindgenOpaqueArray8<[T; N]> {
    fn default() -> Self {
        Self([<T as Default>::default(); N])
    }
}
pub type __u32 = ::std::os::raw::c_uint;
pub type __u64 = ::std::os::raw::c_ulonglong;
pub type __be32 = __u32;
pub type __be64 = __u64;
#[repr(C)]
#[derive(Copy, Clone)]
pub union ibv_gid {
    pub raw: [u8; 16usize],
    pub global: ibv_gid__bindgen_ty_1,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_gid__bindgen_ty_1 {
    pub subnet_prefix: __be64,
    pub interface_id: __be64,
}
pub const IBV_ATOMIC_NONE: ibv_atomic_cap = 0;
pub const IBV_ATOMIC_HCA: ibv_atomic_cap = 1;
pub const IBV_ATOMIC_GLOB: ibv_atomic_cap = 2;
pub type ibv_atomic_cap = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_device_attr {
    pub fw_ver: [::std::os::raw::c_char; 64usize],
    pub node_guid: __be64,
    pub sys_image_guid: __be64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: ::std::os::raw::c_int,
    pub max_qp_wr: ::std::os::raw::c_int,
    pub device_cap_flags: ::std::os::raw::c_uint,
    pub max_sge: ::std::os::raw::c_int,
    pub max_sge_rd: ::std::os::raw::c_int,
    pub max_cq: ::std::os::raw::c_int,
    pub max_cqe: ::std::os::raw::c_int,
    pub max_mr: ::std::os::raw::c_int,
    pub max_pd: ::std::os::raw::c_int,
    pub max_qp_rd_atom: ::std::os::raw::c_int,
    pub max_ee_rd_atom: ::std::os::raw::c_int,
    pub max_res_rd_atom: ::std::os::raw::c_int,
    pub max_qp_init_rd_atom: ::std::os::raw::c_int,
    pub max_ee_init_rd_atom: ::std::os::raw::c_int,
    pub atomic_cap: ibv_atomic_cap,
    pub max_ee: ::std::os::raw::c_int,
    pub max_rdd: ::std::os::raw::c_int,
    pub max_mw: ::std::os::raw::c_int,
    pub max_raw_ipv6_qp: ::std::os::raw::c_int,
    pub max_raw_ethy_qp: ::std::os::raw::c_int,
    pub max_mcast_grp: ::std::os::raw::c_int,
    pub max_mcast_qp_attach: ::std::os::raw::c_int,
    pub max_total_mcast_qp_attach: ::std::os::raw::c_int,
    pub max_ah: ::std::os::raw::c_int,
    pub max_fmr: ::std::os::raw::c_int,
    pub max_map_per_fmr: ::std::os::raw::c_int,
    pub max_srq: ::std::os::raw::c_int,
    pub max_srq_wr: ::std::os::raw::c_int,
    pub max_srq_sge: ::std::os::raw::c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}
pub const IBV_MTU_256: ibv_mtu = 1;
pub const IBV_MTU_512: ibv_mtu = 2;
pub const IBV_MTU_1024: ibv_mtu = 3;
pub const IBV_MTU_2048: ibv_mtu = 4;
pub const IBV_MTU_4096: ibv_mtu = 5;
pub type ibv_mtu = ::std::os::raw::c_uint;
pub const IBV_PORT_NOP: ibv_port_state = 0;
pub const IBV_PORT_DOWN: ibv_port_state = 1;
pub const IBV_PORT_INIT: ibv_port_state = 2;
pub const IBV_PORT_ARMED: ibv_port_state = 3;
pub const IBV_PORT_ACTIVE: ibv_port_state = 4;
pub const IBV_PORT_ACTIVE_DEFER: ibv_port_state = 5;
pub type ibv_port_state = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_port_attr {
    pub state: ibv_port_state,
    pub max_mtu: ibv_mtu,
    pub active_mtu: ibv_mtu,
    pub gid_tbl_len: ::std::os::raw::c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}
pub const IBV_WC_SUCCESS: ibv_wc_status = 0;
pub const IBV_WC_LOC_LEN_ERR: ibv_wc_status = 1;
pub const IBV_WC_LOC_QP_OP_ERR: ibv_wc_status = 2;
pub const IBV_WC_LOC_EEC_OP_ERR: ibv_wc_status = 3;
pub const IBV_WC_LOC_PROT_ERR: ibv_wc_status = 4;
pub const IBV_WC_WR_FLUSH_ERR: ibv_wc_status = 5;
pub const IBV_WC_MW_BIND_ERR: ibv_wc_status = 6;
pub const IBV_WC_BAD_RESP_ERR: ibv_wc_status = 7;
pub const IBV_WC_LOC_ACCESS_ERR: ibv_wc_status = 8;
pub const IBV_WC_REM_INV_REQ_ERR: ibv_wc_status = 9;
pub const IBV_WC_REM_ACCESS_ERR: ibv_wc_status = 10;
pub const IBV_WC_REM_OP_ERR: ibv_wc_status = 11;
pub const IBV_WC_RETRY_EXC_ERR: ibv_wc_status = 12;
pub const IBV_WC_RNR_RETRY_EXC_ERR: ibv_wc_status = 13;
pub const IBV_WC_LOC_RDD_VIOL_ERR: ibv_wc_status = 14;
pub const IBV_WC_REM_INV_RD_REQ_ERR: ibv_wc_status = 15;
pub const IBV_WC_REM_ABORT_ERR: ibv_wc_status = 16;
pub const IBV_WC_INV_EECN_ERR: ibv_wc_status = 17;
pub const IBV_WC_INV_EEC_STATE_ERR: ibv_wc_status = 18;
pub const IBV_WC_FATAL_ERR: ibv_wc_status = 19;
pub const IBV_WC_RESP_TIMEOUT_ERR: ibv_wc_status = 20;
pub const IBV_WC_GENERAL_ERR: ibv_wc_status = 21;
pub const IBV_WC_TM_ERR: ibv_wc_status = 22;
pub const IBV_WC_TM_RNDV_INCOMPLETE: ibv_wc_status = 23;
pub type ibv_wc_status = ::std::os::raw::c_uint;
pub const IBV_WC_SEND: ibv_wc_opcode = 0;
pub const IBV_WC_RDMA_WRITE: ibv_wc_opcode = 1;
pub const IBV_WC_RDMA_READ: ibv_wc_opcode = 2;
pub const IBV_WC_COMP_SWAP: ibv_wc_opcode = 3;
pub const IBV_WC_FETCH_ADD: ibv_wc_opcode = 4;
pub const IBV_WC_BIND_MW: ibv_wc_opcode = 5;
pub const IBV_WC_LOCAL_INV: ibv_wc_opcode = 6;
pub const IBV_WC_TSO: ibv_wc_opcode = 7;
pub const IBV_WC_ATOMIC_WRITE: ibv_wc_opcode = 9;
pub const IBV_WC_RECV: ibv_wc_opcode = 128;
pub const IBV_WC_RECV_RDMA_WITH_IMM: ibv_wc_opcode = 129;
pub const IBV_WC_TM_ADD: ibv_wc_opcode = 130;
pub const IBV_WC_TM_DEL: ibv_wc_opcode = 131;
pub const IBV_WC_TM_SYNC: ibv_wc_opcode = 132;
pub const IBV_WC_TM_RECV: ibv_wc_opcode = 133;
pub const IBV_WC_TM_NO_TAG: ibv_wc_opcode = 134;
pub const IBV_WC_DRIVER1: ibv_wc_opcode = 135;
pub const IBV_WC_DRIVER2: ibv_wc_opcode = 136;
pub const IBV_WC_DRIVER3: ibv_wc_opcode = 137;
pub type ibv_wc_opcode = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_wc {
    pub wr_id: u64,
    pub status: ibv_wc_status,
    pub opcode: ibv_wc_opcode,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub __bindgen_anon_1: ibv_wc__bindgen_ty_1,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: ::std::os::raw::c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union ibv_wc__bindgen_ty_1 {
    pub imm_data: __be32,
    pub invalidated_rkey: u32,
}
pub const IBV_ACCESS_LOCAL_WRITE: ibv_access_flags = 1;
pub const IBV_ACCESS_REMOTE_WRITE: ibv_access_flags = 2;
pub const IBV_ACCESS_REMOTE_READ: ibv_access_flags = 4;
pub const IBV_ACCESS_REMOTE_ATOMIC: ibv_access_flags = 8;
pub const IBV_ACCESS_MW_BIND: ibv_access_flags = 16;
pub const IBV_ACCESS_ZERO_BASED: ibv_access_flags = 32;
pub const IBV_ACCESS_ON_DEMAND: ibv_access_flags = 64;
pub const IBV_ACCESS_HUGETLB: ibv_access_flags = 128;
pub const IBV_ACCESS_RELAXED_ORDERING: ibv_access_flags = 1048576;
pub type ibv_access_flags = ::std::os::raw::c_uint;
#[repr(C)]
#[repr(align(8))]
#[derive(Copy, Clone)]
pub struct ibv_mw_bind_info {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 32usize]>,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_pd {
    pub context: *mut ibv_context,
    pub handle: u32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut ::std::os::raw::c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}
pub const IBV_MW_TYPE_1: ibv_mw_type = 1;
pub const IBV_MW_TYPE_2: ibv_mw_type = 2;
pub type ibv_mw_type = ::std::os::raw::c_uint;
#[repr(C)]
#[repr(align(8))]
#[derive(Copy, Clone)]
pub struct ibv_mw {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 32usize]>,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_global_route {
    pub dgid: ibv_gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_ah_attr {
    pub grh: ibv_global_route,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}
pub const IBV_QPT_RC: ibv_qp_type = 2;
pub const IBV_QPT_UC: ibv_qp_type = 3;
pub const IBV_QPT_UD: ibv_qp_type = 4;
pub const IBV_QPT_RAW_PACKET: ibv_qp_type = 8;
pub const IBV_QPT_XRC_SEND: ibv_qp_type = 9;
pub const IBV_QPT_XRC_RECV: ibv_qp_type = 10;
pub const IBV_QPT_DRIVER: ibv_qp_type = 255;
pub type ibv_qp_type = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_qp_cap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_qp_init_attr {
    pub qp_context: *mut ::std::os::raw::c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub cap: ibv_qp_cap,
    pub qp_type: ibv_qp_type,
    pub sq_sig_all: ::std::os::raw::c_int,
}
pub const IBV_QP_STATE: ibv_qp_attr_mask = 1;
pub const IBV_QP_CUR_STATE: ibv_qp_attr_mask = 2;
pub const IBV_QP_EN_SQD_ASYNC_NOTIFY: ibv_qp_attr_mask = 4;
pub const IBV_QP_ACCESS_FLAGS: ibv_qp_attr_mask = 8;
pub const IBV_QP_PKEY_INDEX: ibv_qp_attr_mask = 16;
pub const IBV_QP_PORT: ibv_qp_attr_mask = 32;
pub const IBV_QP_QKEY: ibv_qp_attr_mask = 64;
pub const IBV_QP_AV: ibv_qp_attr_mask = 128;
pub const IBV_QP_PATH_MTU: ibv_qp_attr_mask = 256;
pub const IBV_QP_TIMEOUT: ibv_qp_attr_mask = 512;
pub const IBV_QP_RETRY_CNT: ibv_qp_attr_mask = 1024;
pub const IBV_QP_RNR_RETRY: ibv_qp_attr_mask = 2048;
pub const IBV_QP_RQ_PSN: ibv_qp_attr_mask = 4096;
pub const IBV_QP_MAX_QP_RD_ATOMIC: ibv_qp_attr_mask = 8192;
pub const IBV_QP_ALT_PATH: ibv_qp_attr_mask = 16384;
pub const IBV_QP_MIN_RNR_TIMER: ibv_qp_attr_mask = 32768;
pub const IBV_QP_SQ_PSN: ibv_qp_attr_mask = 65536;
pub const IBV_QP_MAX_DEST_RD_ATOMIC: ibv_qp_attr_mask = 131072;
pub const IBV_QP_PATH_MIG_STATE: ibv_qp_attr_mask = 262144;
pub const IBV_QP_CAP: ibv_qp_attr_mask = 524288;
pub const IBV_QP_DEST_QPN: ibv_qp_attr_mask = 1048576;
pub const IBV_QP_RATE_LIMIT: ibv_qp_attr_mask = 33554432;
pub type ibv_qp_attr_mask = ::std::os::raw::c_uint;
pub const IBV_QPS_RESET: ibv_qp_state = 0;
pub const IBV_QPS_INIT: ibv_qp_state = 1;
pub const IBV_QPS_RTR: ibv_qp_state = 2;
pub const IBV_QPS_RTS: ibv_qp_state = 3;
pub const IBV_QPS_SQD: ibv_qp_state = 4;
pub const IBV_QPS_SQE: ibv_qp_state = 5;
pub const IBV_QPS_ERR: ibv_qp_state = 6;
pub const IBV_QPS_UNKNOWN: ibv_qp_state = 7;
pub type ibv_qp_state = ::std::os::raw::c_uint;
pub const IBV_MIG_MIGRATED: ibv_mig_state = 0;
pub const IBV_MIG_REARM: ibv_mig_state = 1;
pub const IBV_MIG_ARMED: ibv_mig_state = 2;
pub type ibv_mig_state = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_qp_attr {
    pub qp_state: ibv_qp_state,
    pub cur_qp_state: ibv_qp_state,
    pub path_mtu: ibv_mtu,
    pub path_mig_state: ibv_mig_state,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: ::std::os::raw::c_uint,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}
pub const IBV_WR_RDMA_WRITE: ibv_wr_opcode = 0;
pub const IBV_WR_RDMA_WRITE_WITH_IMM: ibv_wr_opcode = 1;
pub const IBV_WR_SEND: ibv_wr_opcode = 2;
pub const IBV_WR_SEND_WITH_IMM: ibv_wr_opcode = 3;
pub const IBV_WR_RDMA_READ: ibv_wr_opcode = 4;
pub const IBV_WR_ATOMIC_CMP_AND_SWP: ibv_wr_opcode = 5;
pub const IBV_WR_ATOMIC_FETCH_AND_ADD: ibv_wr_opcode = 6;
pub const IBV_WR_LOCAL_INV: ibv_wr_opcode = 7;
pub const IBV_WR_BIND_MW: ibv_wr_opcode = 8;
pub const IBV_WR_SEND_WITH_INV: ibv_wr_opcode = 9;
pub const IBV_WR_TSO: ibv_wr_opcode = 10;
pub const IBV_WR_DRIVER1: ibv_wr_opcode = 11;
pub const IBV_WR_ATOMIC_WRITE: ibv_wr_opcode = 15;
pub type ibv_wr_opcode = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: ::std::os::raw::c_int,
    pub opcode: ibv_wr_opcode,
    pub send_flags: ::std::os::raw::c_uint,
    pub __bindgen_anon_1: ibv_send_wr__bindgen_ty_1,
    pub wr: ibv_send_wr__bindgen_ty_2,
    pub qp_type: ibv_send_wr__bindgen_ty_3,
    pub __bindgen_anon_2: ibv_send_wr__bindgen_ty_4,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union ibv_send_wr__bindgen_ty_1 {
    pub imm_data: __be32,
    pub invalidate_rkey: u32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union ibv_send_wr__bindgen_ty_2 {
    pub rdma: ibv_send_wr__bindgen_ty_2__bindgen_ty_1,
    pub atomic: ibv_send_wr__bindgen_ty_2__bindgen_ty_2,
    pub ud: ibv_send_wr__bindgen_ty_2__bindgen_ty_3,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
    pub remote_addr: u64,
    pub rkey: u32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union ibv_send_wr__bindgen_ty_3 {
    pub xrc: ibv_send_wr__bindgen_ty_3__bindgen_ty_1,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_send_wr__bindgen_ty_3__bindgen_ty_1 {
    pub remote_srqn: u32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union ibv_send_wr__bindgen_ty_4 {
    pub bind_mw: ibv_send_wr__bindgen_ty_4__bindgen_ty_1,
    pub tso: ibv_send_wr__bindgen_ty_4__bindgen_ty_2,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
    pub mw: *mut ibv_mw,
    pub rkey: u32,
    pub bind_info: ibv_mw_bind_info,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_send_wr__bindgen_ty_4__bindgen_ty_2 {
    pub hdr: *mut ::std::os::raw::c_void,
    pub hdr_sz: u16,
    pub mss: u16,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: ::std::os::raw::c_int,
}
#[repr(C)]
#[repr(align(8))]
#[derive(Copy, Clone)]
pub struct ibv_mw_bind {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 48usize]>,
}
#[repr(C)]
#[repr(align(8))]
#[derive(Copy, Clone)]
pub struct ibv_srq {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 128usize]>,
}
#[repr(C)]
pub struct ibv_qp {
    pub context: *mut ibv_context,
    pub qp_context: *mut ::std::os::raw::c_void,
    pub pd: *mut ibv_pd,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: ibv_qp_state,
    pub qp_type: ibv_qp_type,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub events_completed: u32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_comp_channel {
    pub context: *mut ibv_context,
    pub fd: ::std::os::raw::c_int,
    pub refcnt: ::std::os::raw::c_int,
}
#[repr(C)]
pub struct ibv_cq {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
    pub cq_context: *mut ::std::os::raw::c_void,
    pub handle: u32,
    pub cqe: ::std::os::raw::c_int,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}
#[repr(C)]
#[repr(align(8))]
#[derive(Copy, Clone)]
pub struct ibv_ah {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 24usize]>,
}
#[repr(C)]
#[repr(align(8))]
#[derive(Copy, Clone)]
pub struct ibv_device {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 664usize]>,
}
#[repr(C)]
#[derive(Debug)]
pub struct _compat_ibv_port_attr {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ibv_context_ops {
    pub _compat_query_device: ::std::option::Option<
        unsafe extern "C" fn(
            context: *mut ibv_context,
            device_attr: *mut ibv_device_attr,
        ) -> ::std::os::raw::c_int,
    >,
    pub _compat_query_port: ::std::option::Option<
        unsafe extern "C" fn(
            context: *mut ibv_context,
            port_num: u8,
            port_attr: *mut _compat_ibv_port_attr,
        ) -> ::std::os::raw::c_int,
    >,
    pub _compat_alloc_pd: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_dealloc_pd: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_reg_mr: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_rereg_mr: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_dereg_mr: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub alloc_mw: ::std::option::Option<
        unsafe extern "C" fn(pd: *mut ibv_pd, type_: ibv_mw_type) -> *mut ibv_mw,
    >,
    pub bind_mw: ::std::option::Option<
        unsafe extern "C" fn(
            qp: *mut ibv_qp,
            mw: *mut ibv_mw,
            mw_bind: *mut ibv_mw_bind,
        ) -> ::std::os::raw::c_int,
    >,
    pub dealloc_mw: ::std::option::Option<
        unsafe extern "C" fn(mw: *mut ibv_mw) -> ::std::os::raw::c_int,
    >,
    pub _compat_create_cq: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub poll_cq: ::std::option::Option<
        unsafe extern "C" fn(
            cq: *mut ibv_cq,
            num_entries: ::std::os::raw::c_int,
            wc: *mut ibv_wc,
        ) -> ::std::os::raw::c_int,
    >,
    pub req_notify_cq: ::std::option::Option<
        unsafe extern "C" fn(
            cq: *mut ibv_cq,
            solicited_only: ::std::os::raw::c_int,
        ) -> ::std::os::raw::c_int,
    >,
    pub _compat_cq_event: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_resize_cq: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_destroy_cq: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_create_srq: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_modify_srq: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_query_srq: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_destroy_srq: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub post_srq_recv: ::std::option::Option<
        unsafe extern "C" fn(
            srq: *mut ibv_srq,
            recv_wr: *mut ibv_recv_wr,
            bad_recv_wr: *mut *mut ibv_recv_wr,
        ) -> ::std::os::raw::c_int,
    >,
    pub _compat_create_qp: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_query_qp: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_modify_qp: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_destroy_qp: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub post_send: ::std::option::Option<
        unsafe extern "C" fn(
            qp: *mut ibv_qp,
            wr: *mut ibv_send_wr,
            bad_wr: *mut *mut ibv_send_wr,
        ) -> ::std::os::raw::c_int,
    >,
    pub post_recv: ::std::option::Option<
        unsafe extern "C" fn(
            qp: *mut ibv_qp,
            wr: *mut ibv_recv_wr,
            bad_wr: *mut *mut ibv_recv_wr,
        ) -> ::std::os::raw::c_int,
    >,
    pub _compat_create_ah: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_destroy_ah: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_attach_mcast: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_detach_mcast: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
    pub _compat_async_event: ::std::option::Option<
        unsafe extern "C" fn() -> *mut ::std::os::raw::c_void,
    >,
}
#[repr(C)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: ::std::os::raw::c_int,
    pub async_fd: ::std::os::raw::c_int,
    pub num_comp_vectors: ::std::os::raw::c_int,
    pub mutex: pthread_mutex_t,
    pub abi_compat: *mut ::std::os::raw::c_void,
}
pub struct Verbs {
    __library: ::libloading::Library,
    pub ibv_wc_status_str: unsafe extern "C" fn(
        status: ibv_wc_status,
    ) -> *const ::std::os::raw::c_char,
    pub ibv_get_device_list: unsafe extern "C" fn(
        num_devices: *mut ::std::os::raw::c_int,
    ) -> *mut *mut ibv_device,
    pub ibv_free_device_list: unsafe extern "C" fn(list: *mut *mut ibv_device),
    pub ibv_get_device_name: unsafe extern "C" fn(
        device: *mut ibv_device,
    ) -> *const ::std::os::raw::c_char,
    pub ibv_open_device: unsafe extern "C" fn(
        device: *mut ibv_device,
    ) -> *mut ibv_context,
    pub ibv_close_device: unsafe extern "C" fn(
        context: *mut ibv_context,
    ) -> ::std::os::raw::c_int,
    pub ibv_query_device: unsafe extern "C" fn(
        context: *mut ibv_context,
        device_attr: *mut ibv_device_attr,
    ) -> ::std::os::raw::c_int,
    pub ibv_query_port: unsafe extern "C" fn(
        context: *mut ibv_context,
        port_num: u8,
        port_attr: *mut _compat_ibv_port_attr,
    ) -> ::std::os::raw::c_int,
    pub ibv_alloc_pd: unsafe extern "C" fn(context: *mut ibv_context) -> *mut ibv_pd,
    pub ibv_dealloc_pd: unsafe extern "C" fn(pd: *mut ibv_pd) -> ::std::os::raw::c_int,
    pub ibv_reg_mr: unsafe extern "C" fn(
        pd: *mut ibv_pd,
        addr: *mut ::std::os::raw::c_void,
        length: usize,
        access: ::std::os::raw::c_int,
    ) -> *mut ibv_mr,
    pub ibv_dereg_mr: unsafe extern "C" fn(mr: *mut ibv_mr) -> ::std::os::raw::c_int,
    pub ibv_create_comp_channel: unsafe extern "C" fn(
        context: *mut ibv_context,
    ) -> *mut ibv_comp_channel,
    pub ibv_destroy_comp_channel: unsafe extern "C" fn(
        channel: *mut ibv_comp_channel,
    ) -> ::std::os::raw::c_int,
    pub ibv_create_cq: unsafe extern "C" fn(
        context: *mut ibv_context,
        cqe: ::std::os::raw::c_int,
        cq_context: *mut ::std::os::raw::c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: ::std::os::raw::c_int,
    ) -> *mut ibv_cq,
    pub ibv_destroy_cq: unsafe extern "C" fn(cq: *mut ibv_cq) -> ::std::os::raw::c_int,
    pub ibv_get_cq_event: unsafe extern "C" fn(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        cq_context: *mut *mut ::std::os::raw::c_void,
    ) -> ::std::os::raw::c_int,
    pub ibv_ack_cq_events: unsafe extern "C" fn(
        cq: *mut ibv_cq,
        nevents: ::std::os::raw::c_uint,
    ),
    pub ibv_create_qp: unsafe extern "C" fn(
        pd: *mut ibv_pd,
        qp_init_attr: *mut ibv_qp_init_attr,
    ) -> *mut ibv_qp,
    pub ibv_modify_qp: unsafe extern "C" fn(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        attr_mask: ::std::os::raw::c_int,
    ) -> ::std::os::raw::c_int,
    pub ibv_destroy_qp: unsafe extern "C" fn(qp: *mut ibv_qp) -> ::std::os::raw::c_int,
}
impl Verbs {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let path = path.as_ref();
        let library = ::libloading::Library::new(path)?;
        Self::from_library(library)
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let ibv_wc_status_str = __library.get(b"ibv_wc_status_str\0").map(|sym| *sym)?;
        let ibv_get_device_list = __library
            .get(b"ibv_get_device_list\0")
            .map(|sym| *sym)?;
        let ibv_free_device_list = __library
            .get(b"ibv_free_device_list\0")
            .map(|sym| *sym)?;
        let ibv_get_device_name = __library
            .get(b"ibv_get_device_name\0")
            .map(|sym| *sym)?;
        let ibv_open_device = __library.get(b"ibv_open_device\0").map(|sym| *sym)?;
        let ibv_close_device = __library.get(b"ibv_close_device\0").map(|sym| *sym)?;
        let ibv_query_device = __library.get(b"ibv_query_device\0").map(|sym| *sym)?;
        let ibv_query_port = __library.get(b"ibv_query_port\0").map(|sym| *sym)?;
        let ibv_alloc_pd = __library.get(b"ibv_alloc_pd\0").map(|sym| *sym)?;
        let ibv_dealloc_pd = __library.get(b"ibv_dealloc_pd\0").map(|sym| *sym)?;
        let ibv_reg_mr = __library.get(b"ibv_reg_mr\0").map(|sym| *sym)?;
        let ibv_dereg_mr = __library.get(b"ibv_dereg_mr\0").map(|sym| *sym)?;
        let ibv_create_comp_channel = __library
            .get(b"ibv_create_comp_channel\0")
            .map(|sym| *sym)?;
        let ibv_destroy_comp_channel = __library
            .get(b"ibv_destroy_comp_channel\0")
            .map(|sym| *sym)?;
        let ibv_create_cq = __library.get(b"ibv_create_cq\0").map(|sym| *sym)?;
        let ibv_destroy_cq = __library.get(b"ibv_destroy_cq\0").map(|sym| *sym)?;
        let ibv_get_cq_event = __library.get(b"ibv_get_cq_event\0").map(|sym| *sym)?;
        let ibv_ack_cq_events = __library.get(b"ibv_ack_cq_events\0").map(|sym| *sym)?;
        let ibv_create_qp = __library.get(b"ibv_create_qp\0").map(|sym| *sym)?;
        let ibv_modify_qp = __library.get(b"ibv_modify_qp\0").map(|sym| *sym)?;
        let ibv_destroy_qp = __library.get(b"ibv_destroy_qp\0").map(|sym| *sym)?;
        Ok(Verbs {
            __library,
            ibv_wc_status_str,
            ibv_get_device_list,
            ibv_free_device_list,
            ibv_get_device_name,
            ibv_open_device,
            ibv_close_device,
            ibv_query_device,
            ibv_query_port,
            ibv_alloc_pd,
            ibv_dealloc_pd,
            ibv_reg_mr,
            ibv_dereg_mr,
            ibv_create_comp_channel,
            ibv_destroy_comp_channel,
            ibv_create_cq,
            ibv_destroy_cq,
            ibv_get_cq_event,
            ibv_ack_cq_events,
            ibv_create_qp,
            ibv_modify_qp,
            ibv_destroy_qp,
        })
    }
    pub unsafe fn ibv_wc_status_str(
        &self,
        status: ibv_wc_status,
    ) -> *const ::std::os::raw::c_char {
        (self.ibv_wc_status_str)(status)
    }
    pub unsafe fn ibv_get_device_list(
        &self,
        num_devices: *mut ::std::os::raw::c_int,
    ) -> *mut *mut ibv_device {
        (self.ibv_get_device_list)(num_devices)
    }
    pub unsafe fn ibv_free_device_list(&self, list: *mut *mut ibv_device) {
        (self.ibv_free_device_list)(list)
    }
    pub unsafe fn ibv_get_device_name(
        &self,
        device: *mut ibv_device,
    ) -> *const ::std::os::raw::c_char {
        (self.ibv_get_device_name)(device)
    }
    pub unsafe fn ibv_open_device(&self, device: *mut ibv_device) -> *mut ibv_context {
        (self.ibv_open_device)(device)
    }
    pub unsafe fn ibv_close_device(
        &self,
        context: *mut ibv_context,
    ) -> ::std::os::raw::c_int {
        (self.ibv_close_device)(context)
    }
    pub unsafe fn ibv_query_device(
        &self,
        context: *mut ibv_context,
        device_attr: *mut ibv_device_attr,
    ) -> ::std::os::raw::c_int {
        (self.ibv_query_device)(context, device_attr)
    }
    pub unsafe fn ibv_query_port(
        &self,
        context: *mut ibv_context,
        port_num: u8,
        port_attr: *mut _compat_ibv_port_attr,
    ) -> ::std::os::raw::c_int {
        (self.ibv_query_port)(context, port_num, port_attr)
    }
    pub unsafe fn ibv_alloc_pd(&self, context: *mut ibv_context) -> *mut ibv_pd {
        (self.ibv_alloc_pd)(context)
    }
    pub unsafe fn ibv_dealloc_pd(&self, pd: *mut ibv_pd) -> ::std::os::raw::c_int {
        (self.ibv_dealloc_pd)(pd)
    }
    pub unsafe fn ibv_reg_mr(
        &self,
        pd: *mut ibv_pd,
        addr: *mut ::std::os::raw::c_void,
        length: usize,
        access: ::std::os::raw::c_int,
    ) -> *mut ibv_mr {
        (self.ibv_reg_mr)(pd, addr, length, access)
    }
    pub unsafe fn ibv_dereg_mr(&self, mr: *mut ibv_mr) -> ::std::os::raw::c_int {
        (self.ibv_dereg_mr)(mr)
    }
    pub unsafe fn ibv_create_comp_channel(
        &self,
        context: *mut ibv_context,
    ) -> *mut ibv_comp_channel {
        (self.ibv_create_comp_channel)(context)
    }
    pub unsafe fn ibv_destroy_comp_channel(
        &self,
        channel: *mut ibv_comp_channel,
    ) -> ::std::os::raw::c_int {
        (self.ibv_destroy_comp_channel)(channel)
    }
    pub unsafe fn ibv_create_cq(
        &self,
        context: *mut ibv_context,
        cqe: ::std::os::raw::c_int,
        cq_context: *mut ::std::os::raw::c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: ::std::os::raw::c_int,
    ) -> *mut ibv_cq {
        (self.ibv_create_cq)(context, cqe, cq_context, channel, comp_vector)
    }
    pub unsafe fn ibv_destroy_cq(&self, cq: *mut ibv_cq) -> ::std::os::raw::c_int {
        (self.ibv_destroy_cq)(cq)
    }
    pub unsafe fn ibv_get_cq_event(
        &self,
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        cq_context: *mut *mut ::std::os::raw::c_void,
    ) -> ::std::os::raw::c_int {
        (self.ibv_get_cq_event)(channel, cq, cq_context)
    }
    pub unsafe fn ibv_ack_cq_events(
        &self,
        cq: *mut ibv_cq,
        nevents: ::std::os::raw::c_uint,
    ) {
        (self.ibv_ack_cq_events)(cq, nevents)
    }
    pub unsafe fn ibv_create_qp(
        &self,
        pd: *mut ibv_pd,
        qp_init_attr: *mut ibv_qp_init_attr,
    ) -> *mut ibv_qp {
        (self.ibv_create_qp)(pd, qp_init_attr)
    }
    pub unsafe fn ibv_modify_qp(
        &self,
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        attr_mask: ::std::os::raw::c_int,
    ) -> ::std::os::raw::c_int {
        (self.ibv_modify_qp)(qp, attr, attr_mask)
    }
    pub unsafe fn ibv_destroy_qp(&self, qp: *mut ibv_qp) -> ::std::os::raw::c_int {
        (self.ibv_destroy_qp)(qp)
    }
}
