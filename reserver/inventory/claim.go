package inventory

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/google/uuid"
)

// Outcome is the answer to one claim.
type Outcome int

// The outcomes. SoldOut is final unless a confirmed reservation is refunded; AllHeld and Busy may change.
const (
	OutcomeHeld      Outcome = iota + 1 // a new reservation
	OutcomeReplay                       // the buyer's live reservation, or the one that the request's key was given before
	OutcomeSoldOut                      // fewer units than asked for are available or held
	OutcomeAllHeld                      // not enough available, but holds may lapse
	OutcomeBusy                         // units are there, but locked by others for too long
	OutcomeLimit                        // maxPerBuyer
	OutcomeNotOpen                      // before the start
	OutcomeSuspended                    // the sale is suspended
	OutcomeClosed                       // at or after the end
	OutcomeKeyReused                    // the key was used by a request for another quantity
)

// Request asks for Quantity units (1..MaxQuantity, all or nothing) for Buyer (1..MaxIDLength bytes). Key, if not empty, is an
// idempotency key (to MaxIDLength bytes) of the buyer's: a request that was given a reservation is given the same again.
type Request struct {
	Buyer    string
	Quantity int
	Key      string
}

// Result is the answer to one Request.
type Result struct {
	Outcome     Outcome
	Reservation *Reservation // of OutcomeHeld and OutcomeReplay
	AlreadySold int          // of OutcomeLimit: units the buyer bought before
	keep        bool         // the request's key is to be stored with the reservation
}

// Line is one queue of claims. Its calls to Claim must not overlap; any number of lines, in any number of processes,
// may claim from one sale.
type Line struct {
	name         string
	next         int64     // where to look for fresh units; 0 before the first claim
	last         int64     // the highest number a unit can have, as the last batch read it
	missingSince time.Time // since when units are available that the line does not find
	hopeful      bool      // the last batch was of new buyers, and found units for all
}

// NewLine makes a line. The name must be unique among the running lines of the sale; its tally row carries it.
func NewLine(name string) *Line { return &Line{name: name} }

const (
	claimPatience = time.Second            // how long to try to get units that others have locked
	rescanAfter   = 250 * time.Millisecond // how long units must be missing before a line looks for them behind its start
	scanRows      = 20_000                 // rows that one scan for fresh units walks at most
	scans         = 8                      // such scans in one transaction
	sweepInClaim  = 1000                   // expired holds given back by a claim that finds nothing else
)

// Claim answers requests in one transaction, in their order: as many units as they ask for together are taken with
// SKIP LOCKED, written with multi-row statements, committed once. Held is only answered once its commit has returned.
//
// Requests of one buyer get one reservation. A short shelf is final only when the exact counts say so: units locked
// by transactions that may roll back are waited for (up to a second, then OutcomeBusy), expired holds are taken back.
// An error leaves the outcome of every request unknown to the caller; asking again gives the same reservation.
func (s *Store) Claim(ctx context.Context, sale uuid.UUID, line *Line, requests []Request) ([]Result, error) {
	results := make([]Result, len(requests))
	pending := make([]int, len(requests)) // indexes of the requests without a final answer
	for i := range pending {
		pending[i] = i
	}
	giveUp := time.Now().Add(claimPatience)
	for rounds := 1; ; rounds++ {
		batch := make([]Request, len(pending))
		for i, p := range pending {
			batch[i] = requests[p]
		}
		var c *claim
		hopeful := line.hopeful && !slices.ContainsFunc(batch, func(r Request) bool { return r.Key != "" })
		err := retry(ctx, func() error {
			c = &claim{store: s, sale: sale, requests: batch, results: make([]Result, len(batch)), shelf: shelf{line: line}, hopeful: hopeful}
			hopeful = false
			return c.run(ctx)
		})
		if err != nil {
			return nil, err
		}
		for i, p := range pending {
			results[p] = c.results[i]
		}
		short := func(i int) bool {
			o := results[i].Outcome
			return o == OutcomeBusy || c.shelf.overdue && (o == OutcomeAllHeld || o == OutcomeSoldOut)
		}
		pending = slices.DeleteFunc(pending, func(i int) bool { return !short(i) })
		if len(pending) == 0 || time.Now().After(giveUp) {
			return results, nil
		}
		if c.shelf.overdue {
			if _, err := s.Sweep(ctx, sale, line.name, sweepInClaim); err != nil {
				return nil, err
			}
		}
		if !pause(ctx, min(rounds, 4)) {
			return results, nil // Busy, for those without units
		}
	}
}

// retry runs a transaction again after conflicts, up to ten times. A commit of unknown outcome is the caller's.
func retry(ctx context.Context, f func() error) error {
	for round := 1; ; round++ {
		err := f()
		if err == nil || Classify(err) != Conflict || round > 10 || !pause(ctx, round) {
			return err
		}
	}
}

// pause waits a few milliseconds with jitter, longer with each round; false if the context ends first.
func pause(ctx context.Context, round int) bool {
	d := time.Duration(round) * time.Millisecond
	t := time.NewTimer(d + rand.N(2*d))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// claim is one attempt at a batch.
type claim struct {
	store    *Store
	sale     uuid.UUID
	requests []Request
	results  []Result
	buyers   map[string]*buyer  // what the batch's buyers have
	keys     map[hash]storedKey // the keys that are stored
	shelf    shelf
	// hopeful takes the buyers for new ones, without looking them up, and units for granted: one round trip locks all. When that
	// was wrong, run fails with a conflict, and the next attempt looks.
	hopeful bool
}

// run fills results, or fails with nothing changed.
func (c *claim) run(ctx context.Context) error {
	var granted []*Reservation
	err := c.store.inTx(ctx, "claim", func(tx *queries) error {
		granted = nil
		window, units, err := c.look(ctx, tx)
		if err != nil || window.Gate(window.Now) == GateNotOpen {
			return err
		}
		wanted := c.wanted()
		gate := window.Gate(window.Now)
		if gate == GateOpen && wanted > 0 {
			if !c.hopeful {
				if units, err = c.shelf.take(ctx, tx, c.sale, wanted, window.lastUnit()); err != nil {
					return err
				}
			}
			// The row locks waited for may have cost time: the grant counts from now on, when everything waited for is locked.
			gate = window.Gate(units.at)
		}
		free := Counts{Available: int64(units.len())}
		short := units.len() < wanted
		c.shelf.line.last, c.shelf.line.hopeful = window.lastUnit(), gate == GateOpen && !short && !c.anyKnown()
		if c.hopeful && !c.shelf.line.hopeful {
			return errHope
		}
		if gate != GateOpen {
			c.refuseAll(gate)
		} else if wanted > 0 {
			if short {
				if free, err = c.shelf.short(ctx, tx, c.sale, units.len()); err != nil {
					return err
				}
			}
			granted = c.assign(units.all(), free, units.at, window.lapse(units.at))
			c.shelf.leave(units, granted)
		}
		if changes := append(c.keysStored(), c.grants(granted, units)...); len(changes) > 0 {
			return tx.change(ctx, changes...)
		}
		return nil
	})
	var commit *CommitError
	if errors.As(err, &commit) {
		err = c.lookUp(ctx, granted, commit)
	}
	if err == nil {
		c.shelf.commit()
	}
	return err
}

// look reads the sale, locks what the buyers have so that a buyer's claims and confirmations take turns, and answers what needs
// no units. When hopeful, it locks units instead.
func (c *claim) look(ctx context.Context, tx *queries) (window Snapshot, units taken, err error) {
	reads := []read{windowRead(c.sale, &window)}
	if c.hopeful {
		c.buyers = newBuyers(c.requests)
		reads = append(reads, c.shelf.scan(c.sale, c.wanted(), c.shelf.line.last, &units)...)
	} else {
		reads = append(reads, c.buyersReads(" FOR UPDATE")...)
	}
	err = tx.read(ctx, reads...)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return window, units, ErrNoSale
	case err != nil:
		return window, units, fmt.Errorf("reading the sale and its buyers: %w", err)
	case c.hopeful && (window.lastUnit() != c.shelf.line.last || window.Gate(window.Now) != GateOpen):
		return window, units, errHope
	case window.Gate(window.Now) == GateNotOpen: // nobody holds anything yet
		c.refuseAll(GateNotOpen)
		return window, units, nil
	}
	c.answerWithoutUnits(window.MaxPerBuyer)
	if c.hopeful && slices.ContainsFunc(c.results, func(r Result) bool { return r.Outcome != 0 }) {
		err = errHope // beyond the limit, unless the buyer holds something already
	}
	return window, units, err
}

// refuseAll says that the gate is shut, to all but those who have a reservation or misuse a key.
func (c *claim) refuseAll(gate Gate) {
	outcome := map[Gate]Outcome{GateNotOpen: OutcomeNotOpen, GateSuspended: OutcomeSuspended, GateClosed: OutcomeClosed}[gate]
	for i := range c.results {
		if o := c.results[i].Outcome; o != OutcomeReplay && o != OutcomeKeyReused {
			c.results[i] = Result{Outcome: outcome}
		}
	}
}

// windowRead reads the sale's row and shares it until the commit, so that Register, Shrink and CloseSale wait for this transaction.
// It carries no counts.
func windowRead(sale uuid.UUID, w *Snapshot) read {
	w.ID = sale
	var ends, loadedAt, closedAt sql.NullTime
	var ttl int64
	r := oneRow([]any{&w.Units, &w.StartsAt, &ends, &ttl, &w.MaxPerBuyer, &w.RefuseLate, &w.ReleaseAtEnd, &w.Suspended, &w.Draining,
		&loadedAt, &closedAt, &w.removed, &w.Now},
		`SELECT units, starts_at, ends_at, hold_ttl_us, max_per_buyer, refuse_late, release_at_end, suspended, draining, loaded_at, closed_at, removed, UTC_TIMESTAMP(6)
		FROM flashsale_sale WHERE sale_id = ? LOCK IN SHARE MODE`, id(sale))
	found := r.after
	r.after = func() error {
		w.EndsAt, w.LoadedAt, w.ClosedAt = ends.Time, loadedAt.Time, closedAt.Time
		w.HoldTTL = time.Duration(ttl) * time.Microsecond
		return found()
	}
	return r
}

// buyer is what a buyer has, as the newest of his reservations tells.
type buyer struct {
	newest  uuid.UUID // zero for a buyer without any
	earlier int       // reservations before that one
	sold    int
	live    *Reservation // the newest, while held and not past its time
}

// has is how many units count against the buyer's limit.
func (b *buyer) has() int {
	if b.live != nil {
		return b.sold + b.live.Quantity
	}
	return b.sold
}

// newBuyers takes the buyers for such as have nothing yet.
func newBuyers(requests []Request) map[string]*buyer {
	buyers := make(map[string]*buyer, len(requests))
	for _, r := range requests {
		buyers[r.Buyer] = &buyer{}
	}
	return buyers
}

// buyersReads read what the batch's buyers have, and which of their keys are stored.
func (c *claim) buyersReads(lock string) []read {
	c.buyers, c.keys = newBuyers(c.requests), map[hash]storedKey{}
	reads := []read{buyersRead(c.sale, c.buyers, lock)}
	var hashes []hash
	for _, r := range c.requests {
		if r.Key != "" {
			hashes = append(hashes, hashOf(r))
		}
	}
	if len(hashes) > 0 {
		reads = append(reads, keysRead(c.sale, hashes, c.keys))
	}
	return reads
}

// anyKnown says whether a buyer of the batch had a reservation before.
func (c *claim) anyKnown() bool {
	for _, b := range c.buyers {
		if b.newest != uuid.Nil {
			return true
		}
	}
	return false
}

// buyersRead reads what buyers have, by their names.
func buyersRead(sale uuid.UUID, buyers map[string]*buyer, lock string) read {
	var keys [][]byte
	for _, n := range slices.Sorted(maps.Keys(buyers)) { // one order of locks for all batches
		keys = append(keys, []byte(n))
	}
	v := newValues("SELECT buyer, reservation_id, earlier, bought, quantity, state, granted_at, expires_at, UTC_TIMESTAMP(6) FROM ").keys(keys).
		text(" STRAIGHT_JOIN flashsale_reservation FORCE INDEX (buyer) ON sale_id = ").bytes(id(sale)).text(" AND buyer = UNHEX(v.`key`) AND superseded = 0")
	return read{query: v.text(lock).String(), each: func(rows *sql.Rows) error {
		var name, rid []byte
		var now time.Time
		var r Reservation
		var earlier, bought int
		if err := rows.Scan(&name, &rid, &earlier, &bought, &r.Quantity, &r.State, &r.GrantedAt, &r.ExpiresAt, &now); err != nil {
			return err
		}
		r.ID, r.Buyer = uuid.UUID(rid), string(name)
		b := buyers[r.Buyer]
		b.newest, b.earlier, b.sold = r.ID, earlier, bought
		switch {
		case r.State == Confirmed || r.State == RefundedKept: // not Refunded: those units went back
			b.sold += r.Quantity
		case r.State == Held && r.ExpiresAt.After(now):
			b.live = &r
		}
		return nil
	}}
}

// hash stands for a buyer's key in the database.
type hash [16]byte

func hashOf(r Request) hash {
	h := sha256.Sum256(fmt.Appendf(nil, "%d:%s%s", len(r.Buyer), r.Buyer, r.Key))
	return hash(h[:])
}

// storedKey is a row of flashsale_key, with its reservation as it is now.
type storedKey struct {
	quantity    int
	reservation *Reservation
}

func keysRead(sale uuid.UUID, hashes []hash, into map[hash]storedKey) read {
	v := newValues(`SELECT k.key_hash, k.quantity, r.reservation_id, r.buyer, r.quantity,
		IF(r.state = 1 AND r.expires_at <= UTC_TIMESTAMP(6), 4, r.state), r.granted_at, r.expires_at
		FROM flashsale_key k JOIN flashsale_reservation r ON r.sale_id = k.sale_id AND r.reservation_id = k.reservation_id
		WHERE k.sale_id = `).bytes(id(sale)).text(" AND k.key_hash IN (")
	for i, h := range hashes {
		v.next(i).bytes(h[:])
	}
	return read{query: v.text(")").String(), each: func(rows *sql.Rows) error {
		var h, rid, name []byte
		k := storedKey{reservation: &Reservation{}}
		r := k.reservation
		if err := rows.Scan(&h, &k.quantity, &rid, &name, &r.Quantity, &r.State, &r.GrantedAt, &r.ExpiresAt); err != nil {
			return err
		}
		r.ID, r.Buyer = uuid.UUID(rid), string(name)
		into[hash(h)] = k
		return nil
	}}
}

// LookUp answers what can be answered without units: replays and limits. The others get no Outcome; one of them that has a
// Reservation is a replay whose key has still to be stored, by Claim. LookUp takes no lock, and serves buyers who press again
// when memory already knows that the shelf is empty.
func (s *Store) LookUp(ctx context.Context, sale uuid.UUID, maxPerBuyer int, requests []Request) ([]Result, error) {
	c := claim{sale: sale, requests: requests, results: make([]Result, len(requests))}
	if err := s.queries("look up").read(ctx, c.buyersReads("")...); err != nil {
		return nil, fmt.Errorf("reading the buyers: %w", err)
	}
	c.answerWithoutUnits(maxPerBuyer)
	for i := range c.results {
		if c.results[i].keep {
			c.results[i] = Result{Reservation: c.results[i].Reservation}
		}
	}
	return c.results, nil
}

// answerWithoutUnits answers replays and limits. A buyer's second request in the batch waits for the first one's answer.
func (c *claim) answerWithoutUnits(maxPerBuyer int) {
	for i, r := range c.requests {
		b := c.buyers[r.Buyer]
		if r.Key != "" { // hashing is dear, and most have none
			if k, stored := c.keys[hashOf(r)]; stored {
				c.results[i] = k.answer(r)
				continue
			}
		}
		switch {
		case b.live != nil:
			c.results[i] = Result{Outcome: OutcomeReplay, Reservation: b.live, keep: r.Key != ""}
		case b.sold+r.Quantity > maxPerBuyer:
			c.results[i] = Result{Outcome: OutcomeLimit, AlreadySold: b.sold}
		}
	}
}

// wanted is how many units the requests without an answer ask for together, each buyer's first one.
func (c *claim) wanted() (units int) {
	seen := make(map[string]bool, len(c.requests))
	for i, r := range c.requests {
		if c.results[i].Outcome == 0 && !seen[r.Buyer] {
			seen[r.Buyer] = true
			units += r.Quantity
		}
	}
	return units
}

// answer is what a request gets whose key was used before.
func (k storedKey) answer(r Request) Result {
	if k.quantity != r.Quantity {
		return Result{Outcome: OutcomeKeyReused}
	}
	return Result{Outcome: OutcomeReplay, Reservation: k.reservation}
}

// assign gives the units to the unanswered requests, in order, and says of the others why not. free are the exact
// counts: units available but not among those locked here are locked by others, who may roll back.
func (c *claim) assign(units []int64, free Counts, now, expires time.Time) []*Reservation {
	var granted []*Reservation
	elsewhere := max(free.Available-int64(len(units)), 0)
	held := free.Held
	for i, r := range c.requests {
		if c.results[i].Outcome != 0 {
			continue
		}
		b := c.buyers[r.Buyer]
		k, left := int64(r.Quantity), int64(len(units))
		switch {
		case b.live != nil: // granted to the same buyer a moment ago, in this batch
			c.results[i] = Result{Outcome: OutcomeReplay, Reservation: b.live, keep: r.Key != ""}
		case k <= left:
			res := &Reservation{Buyer: r.Buyer, Quantity: r.Quantity, Units: units[:k:k], State: Held,
				GrantedAt: now, ExpiresAt: expires}
			units, held = units[k:], held+k
			b.live = res
			granted = append(granted, res)
			c.results[i] = Result{Outcome: OutcomeHeld, Reservation: res, keep: r.Key != ""}
		case k <= left+elsewhere:
			c.results[i] = Result{Outcome: OutcomeBusy}
		case k <= left+elsewhere+held:
			c.results[i] = Result{Outcome: OutcomeAllHeld}
		default:
			c.results[i] = Result{Outcome: OutcomeSoldOut}
		}
	}
	// In the order of their buyers, so that two batches with common buyers wait for, and do not deadlock with, each other; and
	// the ids ascend in it too, so that rows are appended to the primary key.
	slices.SortFunc(granted, func(a, b *Reservation) int { return cmp.Compare(a.Buyer, b.Buyer) })
	for i, r := range granted {
		r.ID = idAt(now, i)
	}
	return granted
}

// keysStored stores the keys of the requests that are answered with a reservation for the first time.
func (c *claim) keysStored() []change {
	v, n := newValues("INSERT INTO flashsale_key (sale_id, key_hash, quantity, reservation_id) VALUES "), 0
	for i, r := range c.requests {
		if !c.results[i].keep {
			continue
		}
		h := hashOf(r)
		if k, twice := c.keys[h]; twice { // by another request of this batch
			c.results[i] = k.answer(r)
			continue
		}
		c.keys[h] = storedKey{r.Quantity, c.results[i].Reservation}
		v.next(n).text("(").bytes(id(c.sale)).comma().bytes(h[:]).comma().num(int64(r.Quantity)).comma().bytes(id(c.results[i].Reservation.ID)).text(")")
		n++
	}
	if n == 0 {
		return nil
	}
	return []change{changing(n, "storing idempotency keys", v.String())}
}

// grants moves the units of the granted reservations, and records who has them.
func (c *claim) grants(granted []*Reservation, units taken) []change {
	if len(granted) == 0 {
		return nil
	}
	n := int64(0)
	for _, r := range granted {
		n += int64(r.Quantity)
	}
	return slices.Concat(c.newest(granted), units.give(c.sale, granted), []change{
		writeWave(c.sale, granted[0].ExpiresAt, granted), // they were granted together, and lapse together
		writeEvents(c.sale, eventHeld, granted),
		tally(c.sale, c.shelf.line.name, Counts{Available: -n, Held: n}, c.shelf.next, len(granted)),
	})
}

// newest records the reservations as the newest of their buyers. When another pod served a new buyer first, that is a
// duplicate key, and the attempt starts again.
func (c *claim) newest(granted []*Reservation) (changes []change) {
	columns, known := "", c.anyKnown()
	if known { // else the defaults are right
		columns = ", earlier, bought"
	}
	old, n := newValues("UPDATE flashsale_reservation FORCE INDEX (PRIMARY) SET superseded = earlier + 1 WHERE sale_id = ").bytes(id(c.sale)).text(" AND superseded = 0 AND reservation_id IN ("), 0
	v := newValues("INSERT INTO flashsale_reservation (sale_id, reservation_id, buyer, quantity, unit_nos, granted_at, expires_at").text(columns).text(") VALUES ")
	times := newValues("',").time(granted[0].GrantedAt).comma().time(granted[0].ExpiresAt).String()
	for i, r := range granted {
		b := c.buyers[r.Buyer]
		v.next(i).text("(").bytes(id(c.sale)).comma().bytes(id(r.ID)).comma().bytes([]byte(r.Buyer)).comma().num(int64(r.Quantity)).
			text(",'").text(joinUnits(r.Units)).text(times)
		earlier := 0
		if b.newest != uuid.Nil {
			earlier = b.earlier + 1
			old.next(n).bytes(id(b.newest))
			n++
		}
		if known {
			v.comma().num(int64(earlier)).comma().num(int64(b.sold))
		}
		v.text(")")
	}
	if n > 0 {
		changes = append(changes, changing(n, "superseding reservations", old.text(")").String()))
	}
	return append(changes, changing(len(granted), "recording reservations", v.String()))
}

// lookUp finds out whether a commit whose connection broke took effect. The locking read waits for the transaction's
// own locks to go, so its answer is final.
func (c *claim) lookUp(ctx context.Context, granted []*Reservation, commit *CommitError) error {
	if len(granted) == 0 {
		return commit
	}
	var quantity int
	err := c.store.queries("look up a commit").row(ctx, "SELECT quantity FROM flashsale_reservation WHERE sale_id = ? AND reservation_id = ? LOCK IN SHARE MODE",
		id(c.sale), id(granted[0].ID)).Scan(&quantity)
	if err != nil { // not there, or not to be known now
		return commit
	}
	return nil
}

// tally adds to a line's counts, and to the reservations that it made.
func tally(sale uuid.UUID, line string, counts Counts, next int64, granted int) change {
	return changing(anyRows, "counting", `INSERT INTO flashsale_tally (sale_id, line, available, held, sold, next_unit, granted) VALUES (?,?,?,?,?,?,?)
		ON DUPLICATE KEY UPDATE available = available + VALUES(available), held = held + VALUES(held), sold = sold + VALUES(sold),
		next_unit = GREATEST(next_unit, VALUES(next_unit)), granted = granted + VALUES(granted)`,
		id(sale), line, counts.Available, counts.Held, counts.Sold, max(next, 1), granted)
}
