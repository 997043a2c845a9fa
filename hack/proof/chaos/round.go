package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/reserver/keys"
)

const (
	loadLasts     = 3 * time.Second // at least
	loadAfter     = time.Second     // the last fault
	recoverWithin = time.Minute
	checkPatience = 30 * time.Second
	sweepLateness = 2 * time.Second // I4
	noReservation = "00000000-0000-7000-8000-000000000000"
)

// harness is what rounds share.
type harness struct {
	server   *server
	binaries binaries
	proxies  *proxies
	folder   string // for logs and evidence
	keys     string // file, of the pods
}

// theKeys are those of all pods; the crowd is the checkout, too.
var theKeys = keys.New(1)

// newHarness builds the reservers and starts MySQL. Close it.
func newHarness(ctx context.Context, root, instance string, say func(string)) (h *harness, err error) {
	h = &harness{proxies: newProxies()}
	if h.folder, err = os.MkdirTemp("", "chaos-"); err != nil {
		return nil, err
	}
	h.keys = filepath.Join(h.folder, keys.FileName)
	if err := os.WriteFile(h.keys, theKeys.Encode(), 0o600); err != nil {
		return h, err
	}
	say("building the reserver, and two with a wrong clock ...")
	if h.binaries, err = build(ctx, root, h.folder); err != nil {
		return h, err
	}
	say("starting MySQL ...")
	h.server, err = startServer(ctx, root, instance)
	return h, err
}

// close stops MySQL and removes what is of no use any more; evidence of failures stays.
func (h *harness) close() error {
	var err error
	if h.server != nil {
		err = h.server.stop()
	}
	if left, _ := filepath.Glob(filepath.Join(h.folder, "round-*")); len(left) == 0 {
		return errors.Join(err, os.RemoveAll(h.folder))
	}
	for _, b := range h.binaries {
		err = errors.Join(err, os.Remove(b))
	}
	return err
}

// round is one sale under fault.
type round struct {
	*harness
	plan      plan
	folder    string
	sale      *sale
	reservers []*pod
	sweepers  []*pod
	crowd     *crowd
	began     time.Time
	clock     clock
	putBack   func() error // what a fault changed for as long as the round lasts
	stage     string       // what it is doing, since when, and what took longest so far
	since     time.Time
	longest   string
	most      time.Duration
	history   history
}

// result is what a round showed.
type result struct {
	plan     plan
	answers  map[string]int
	calls    int
	unknown  int   // calls of unknown outcome
	cut      int64 // connections lost at COMMIT
	audit    string
	verdict  porcupine.CheckResult
	checked  time.Duration // how long the checker took
	took     time.Duration
	longest  string // stage
	failures []string
	history  *history
}

// run plays the round and judges it. What it made is gone when it returns, but for the evidence of a failure.
func (h *harness) run(ctx context.Context, p plan) *result {
	r := &round{harness: h, plan: p, folder: filepath.Join(h.folder, fmt.Sprintf("round-%d-%d", p.seed, p.number)), began: time.Now()}
	result := &result{plan: p, answers: map[string]int{}, audit: "not run", verdict: porcupine.Unknown, history: &r.history}
	fail := func(what string, err error) {
		if err != nil {
			result.failures = append(result.failures, what+": "+err.Error())
		}
	}
	cut := commitsCut.Load()
	fail("round", r.play(ctx, result))
	result.cut = commitsCut.Load() - cut
	r.enter("clearing up")
	r.stop()
	if r.putBack != nil {
		fail("putting back", r.putBack())
	}
	if r.sale != nil {
		fail("dropping the database", r.sale.drop(context.WithoutCancel(ctx)))
	}
	if r.crowd != nil {
		for _, c := range r.crowd.calls {
			result.answers[c.Answer]++
			result.calls++
			if c.undecided() {
				result.unknown++
			}
		}
	}
	r.enter("")
	result.took, result.longest = time.Since(r.began), fmt.Sprintf("%s %.1f s", r.longest, r.most.Seconds())
	if len(result.failures) == 0 {
		fail("removing logs", os.RemoveAll(r.folder))
	} else {
		fail("keeping the history", os.WriteFile(filepath.Join(r.folder, "history.txt"), []byte(r.history.text()), 0o644))
		result.failures = append(result.failures, "history and logs are in "+r.folder)
	}
	return result
}

func (r *round) pods() []*pod { return slices.Concat(r.reservers, r.sweepers) }

// enter begins a stage of the round.
func (r *round) enter(stage string) {
	if d := time.Since(r.since); r.stage != "" && d > r.most {
		r.longest, r.most = r.stage, d
	}
	r.stage, r.since = stage, time.Now()
}

// stop ends the processes, and with the proxies what connections of theirs a toxic may have left open.
func (r *round) stop() {
	for _, p := range r.pods() {
		p.kill()
		p.proxy.Stop()
	}
}

func (r *round) now() int64 { return time.Since(r.began).Nanoseconds() }

func (r *round) play(ctx context.Context, result *result) error {
	r.enter("opening")
	if err := r.open(ctx); err != nil {
		return err
	}
	r.enter("load")
	if err := r.load(ctx); err != nil {
		return fmt.Errorf("injecting faults: %w", err)
	}
	r.enter("recovering")
	healed, err := r.recovered(ctx)
	if err != nil {
		return err
	}
	r.enter("selling the rest")
	result.failures = append(result.failures, r.sellTheRest(ctx)...)
	r.enter("giving back")
	if err := r.comeBack(ctx); err != nil {
		result.failures = append(result.failures, "I7: "+err.Error())
	}
	r.enter("lapsing")
	if err := r.lapse(ctx); err != nil {
		result.failures = append(result.failures, "I4: "+err.Error())
	}
	r.enter("agreeing")
	if err := r.agree(ctx); err != nil {
		result.failures = append(result.failures, "I8: "+err.Error())
	}
	r.enter("stopping")
	r.stop()
	if err := r.server.quiet(ctx); err != nil {
		return err
	}
	r.enter("collecting")
	if err := r.collect(ctx); err != nil {
		return err
	}
	r.enter("auditing")
	broken, err := r.sale.audit(ctx)
	if err != nil {
		return fmt.Errorf("auditing: %w", err)
	}
	result.audit = "OK"
	if len(broken) > 0 {
		result.audit = "BROKEN"
	}
	result.failures = slices.Concat(result.failures, broken, r.crowd.untyped, r.history.promises(), r.lateHolds(healed))
	r.enter("judging")
	return r.judge(result)
}

// open makes the sale and starts its processes.
func (r *round) open(ctx context.Context) (err error) {
	if err := os.MkdirAll(r.folder, 0o755); err != nil {
		return err
	}
	if err := r.server.awake(ctx); err != nil {
		return err
	}
	c, dbNow, err := r.server.compare(ctx, r.now)
	if err != nil {
		return err
	}
	r.clock = c
	spec := inventory.Sale{ID: uuid.New(), Name: "chaos/sale", SKU: "sku", Units: int64(r.plan.units), StartsAt: dbNow.Add(-time.Minute),
		HoldTTL: r.plan.ttl, MaxPerBuyer: r.plan.limit, Generation: 1}
	if r.plan.endsAfter > 0 {
		spec.EndsAt = dbNow.Add(time.Second + r.plan.endsAfter) // starting the processes takes about a second
	}
	if r.sale, err = r.server.newSale(ctx, fmt.Sprintf("chaos_%d_%d", r.plan.number, time.Now().UnixNano()), spec); err != nil {
		return err
	}
	for i := range r.plan.reservers {
		off := time.Duration(0)
		if r.plan.skewed && i < 2 {
			off = []time.Duration{skew, -skew}[i]
		}
		p, err := r.pod(fmt.Sprintf("reserver-%d", i), "serve", off)
		if err != nil {
			return err
		}
		r.reservers = append(r.reservers, p)
	}
	for i := range r.plan.sweepers {
		p, err := r.pod(fmt.Sprintf("sweeper-%d", i), "sweep", 0)
		if err != nil {
			return err
		}
		r.sweepers = append(r.sweepers, p)
	}
	for _, p := range r.pods() {
		if err := p.ready(ctx); err != nil {
			return err
		}
	}
	r.crowd = &crowd{now: r.now, reservers: r.reservers, limit: r.plan.limit}
	return nil
}

// pod starts a process of the sale.
func (r *round) pod(name, command string, off time.Duration) (*pod, error) {
	proxy, err := r.proxies.open(name, r.server.config.Addr)
	if err != nil {
		return nil, err
	}
	p := &pod{name: name, proxy: proxy, off: off}
	if p.admin, err = freeAddress(); err != nil {
		return nil, err
	}
	secret := filepath.Join(r.folder, name+".dsn")
	if err := os.WriteFile(secret, []byte(r.sale.dsn(proxy.Listen)), 0o600); err != nil {
		return nil, err
	}
	args := []string{command, "--sale-id=" + r.sale.ID.String(), "--database=" + secret, "--pod=" + name, "--admin=" + p.admin}
	if command == "serve" {
		if p.api, err = freeAddress(); err != nil {
			return nil, err
		}
		args = append(args, "--listen="+p.api, "--trusted-proxies=127.0.0.0/8", "--buyer-rate=0", "--keys="+r.keys)
	}
	log, err := os.Create(filepath.Join(r.folder, name+".log"))
	if err != nil {
		return nil, err
	}
	p.cmd = func() *exec.Cmd {
		cmd := exec.Command(r.binaries[off], args...)
		cmd.Stdout, cmd.Stderr = log, log
		return cmd
	}
	return p, p.start()
}

// load lets the crowd loose and does harm, until the harm is over for a while.
func (r *round) load(ctx context.Context) error {
	var clients, harm sync.WaitGroup
	errs := make([]error, len(r.plan.faults))
	for i, f := range r.plan.faults {
		harm.Go(func() {
			if pause(ctx, f.at) {
				errs[i] = f.inject(ctx, r, f)
			}
		})
	}
	crowding, leave := context.WithCancel(ctx)
	defer leave()
	for i := range r.plan.clients {
		clients.Go(func() {
			r.crowd.client(crowding, i, dice(r.plan.seed, r.plan.number, i), loadLasts*time.Duration(r.plan.clients)/(2*budget))
		})
	}
	pause(ctx, loadLasts-loadAfter)
	harm.Wait()
	pause(ctx, loadAfter)
	leave()
	clients.Wait()
	return errors.Join(append(errs, ctx.Err())...)
}

// recovered waits until every reserver gives an answer that comes from the database, and says when all did.
func (r *round) recovered(ctx context.Context) (time.Time, error) {
	if err := r.server.awake(ctx); err != nil {
		return time.Time{}, err
	}
	for _, p := range r.reservers {
		err := eventually(ctx, recoverWithin, p.name+" answers again", func() error {
			request, err := http.NewRequestWithContext(ctx, "GET", "http://"+p.api+"/v1/reservations/"+noReservation, nil)
			if err != nil {
				return err
			}
			status, body, err := send(request)
			if err == nil && (status != http.StatusNotFound || !strings.Contains(string(body), "reservation-not-found")) {
				err = fmt.Errorf("status %d: %s", status, body)
			}
			return err
		})
		if err != nil {
			return time.Time{}, err
		}
	}
	_, at, err := r.server.compare(ctx, r.now)
	return at, err
}

// sellTheRest claims and pays what is left, at all reservers in turn, and then every unit must be held or sold: nothing was
// lost. In a sale that has ended, every reserver must say so.
func (r *round) sellTheRest(ctx context.Context) (failures []string) {
	rng := dice(r.plan.seed, r.plan.number, r.plan.clients)
	if r.plan.endsAfter > 0 {
		for i := range r.reservers {
			err := eventually(ctx, recoverWithin, "a claim is answered that the sale is over", func() error {
				c := r.crowd.do(ctx, call{Client: r.plan.clients, Do: "reserve", Buyer: fmt.Sprint("late-", i), Quantity: 1}, i)
				if c.Answer != "closed" {
					return errors.New(c.Answer)
				}
				return nil
			})
			if err != nil {
				failures = append(failures, "I9: "+err.Error())
			}
		}
		return failures
	}
	last := ""
	err := eventually(ctx, recoverWithin, "every unit is held or sold", func() error {
		buyer := fmt.Sprintf("last-%d", rng.Uint32())
		claim := r.crowd.insist(ctx, call{Client: r.plan.clients, Do: "reserve", Buyer: buyer, Quantity: 1}, rng)
		if last = claim.Answer; last == "granted" || last == "held" {
			last = r.crowd.insist(ctx, call{Client: r.plan.clients, Do: "confirm", Reservation: claim.Reservation, Payment: "pay-" + buyer}, rng).Answer
		}
		snap, err := r.sale.store.Snapshot(ctx, r.sale.ID)
		if err == nil && snap.Held+snap.Sold != snap.Units {
			err = fmt.Errorf("%d held and %d sold of %d, the last answer was %s", snap.Held, snap.Sold, snap.Units, last)
		}
		return err
	})
	if err != nil {
		failures = append(failures, "I3, undersold: "+err.Error())
	}
	return failures
}

// comeBack gives one sold unit back, and lets each reserver in turn have it: with nobody else claiming, the history shows for
// how long each said that there was none.
func (r *round) comeBack(ctx context.Context) error {
	if r.plan.endsAfter > 0 {
		return nil
	}
	bought := ""
	for _, c := range r.crowd.calls {
		switch {
		case c.Do == "confirm" && c.Answer == "confirmed":
			bought = c.Reservation
		case c.Do == "refund" && c.Reservation == bought:
			bought = ""
		}
	}
	rng := dice(r.plan.seed, r.plan.number, r.plan.clients+1)
	back := call{Client: r.plan.clients, Do: "refund", Reservation: bought, Restock: true}
	for i := range r.reservers {
		if back.Reservation == "" {
			return nil
		}
		if done := r.crowd.insist(ctx, back, rng); done.Answer != "refunded" && done.Answer != "released" {
			return fmt.Errorf("could not give a unit back: %s", &done)
		}
		claim := call{Client: r.plan.clients, Do: "reserve", Buyer: fmt.Sprint("next-", i), Quantity: 1}
		err := eventually(ctx, recoverWithin, "a unit that came back is granted", func() error {
			if claim = r.crowd.do(ctx, claim, i); claim.Answer != "granted" && claim.Answer != "held" {
				return errors.New(claim.Answer)
			}
			return nil
		})
		if err != nil {
			return err
		}
		back = call{Client: r.plan.clients, Do: "release", Reservation: claim.Reservation}
	}
	return nil
}

// lapse waits until short holds have ended; long ones stay.
func (r *round) lapse(ctx context.Context) error {
	if r.plan.ttl > time.Minute {
		return nil
	}
	return eventually(ctx, r.plan.ttl+10*time.Second, "no hold is live", func() error {
		snap, err := r.sale.store.Snapshot(ctx, r.sale.ID)
		if err == nil && snap.Held > 0 {
			err = fmt.Errorf("%d units are held", snap.Held)
		}
		return err
	})
}

// agree waits until every reserver shows the counts of the rows.
func (r *round) agree(ctx context.Context) error {
	for _, p := range r.reservers {
		err := eventually(ctx, 10*time.Second, p.name+" shows the counts of the rows", func() error {
			snap, err := r.sale.store.Snapshot(ctx, r.sale.ID)
			if err != nil {
				return err
			}
			request, err := http.NewRequestWithContext(ctx, "GET", "http://"+p.api+"/v1/stock", nil)
			if err != nil {
				return err
			}
			_, body, err := send(request)
			if err != nil {
				return err
			}
			var shown inventory.Counts
			if err := json.Unmarshal(body, &shown); err != nil {
				return err
			}
			if shown != snap.Counts {
				return fmt.Errorf("it shows %+v, the rows are %+v", shown, snap.Counts)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// collect reads what the round left behind.
func (r *round) collect(ctx context.Context) error {
	c, _, err := r.server.compare(ctx, r.now)
	if err != nil {
		return err
	}
	r.clock = r.clock.join(c)
	rows, ledger, err := r.sale.rows(ctx)
	if err != nil {
		return err
	}
	r.history = history{units: r.plan.units, limit: r.plan.limit, calls: r.crowd.calls, rows: rows, ledger: ledger, clock: r.clock,
		endsAt: r.sale.EndsAt, end: r.now()}
	return nil
}

// lateHolds are holds that stayed live for longer than they may, not counting the time in which faults kept sweepers from the
// database.
func (r *round) lateHolds(healed time.Time) []string {
	var late []string
	for _, row := range r.history.rows {
		due := row.expiresAt
		if due.Before(healed) {
			due = healed
		}
		if row.letter == expired && row.changedAt.Sub(due) > sweepLateness {
			late = append(late, fmt.Sprintf("I4: reservation %s was live for %v after its time or the faults' end", row.id, row.changedAt.Sub(due)))
		}
	}
	return late
}

// judge checks the history, and keeps a picture of one that is not linearizable.
func (r *round) judge(result *result) error {
	began := time.Now()
	v, err := r.history.check(checkPatience)
	result.verdict, result.checked = v.CheckResult, time.Since(began)
	switch {
	case err != nil:
		return fmt.Errorf("linearizability: %w", err)
	case v.CheckResult == porcupine.Ok, v.CheckResult == porcupine.Unknown: // how many may be undecided, runRounds says
		return nil
	}
	picture := filepath.Join(r.folder, "history.html")
	return errors.Join(fmt.Errorf("linearizability: illegal, see %s", picture), porcupine.VisualizePath(v.model, v.info, picture))
}

// line is the round in one line, after its number.
func (r *result) line() string {
	var answers []string
	for _, a := range slices.Sorted(maps.Keys(r.answers)) {
		answers = append(answers, fmt.Sprintf("%s %d", a, r.answers[a]))
	}
	return fmt.Sprintf("%s | %s | audit %s | linearizable %s (%d ms) | %.1f s, longest %s", r.plan, strings.Join(answers, ", "), r.audit, strings.ToLower(string(r.verdict)), r.checked.Milliseconds(), r.took.Seconds(), r.longest)
}
