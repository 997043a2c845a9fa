package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"text/template"
	"time"
)

const namespace, sale = "flashsale-demo", "iphone17"

// demo drives one sale with kubectl.
type demo struct {
	mu      sync.Mutex
	out     io.Writer
	image   string // of the product
	shop    string // image of the shoppers
	dsnFile string
	clicks  int
	// lonely takes the operator away before the start, and brings it back when the winners have paid.
	lonely bool
	start  time.Time
}

// objects are what the demo applies: the sale as a platform team would write it, with times of its own.
var objects = template.Must(template.New("").Parse(`
apiVersion: sales.flashsale.dev/v1alpha1
kind: FlashSale
metadata: {name: iphone17, namespace: flashsale-demo}
spec:
  sku: iphone17
  units: 5
  startTime: "{{.Start}}"
  holdTTL: 20s
  database: {secretRef: {name: sales-db}}
  reserver: {replicas: 2, warmup: 20s}
  admission: {trustedProxies: [10.0.0.0/8]} # the shoppers' pods name themselves
`))

// job is a pod that runs once, under the restricted pod security standard.
var job = template.Must(template.New("").Parse(`
apiVersion: batch/v1
kind: Job
metadata: {name: {{.Name}}, namespace: flashsale-demo}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      securityContext: {runAsNonRoot: true, runAsUser: 65532, runAsGroup: 65532, fsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
      volumes: [{name: database, secret: {secretName: sales-db}}]
      containers:
      - name: main
        image: {{.Image}}
        imagePullPolicy: IfNotPresent
        command: {{.Command}}
        {{- if .Checkout}}
        env: [{name: CHECKOUT_TOKEN, valueFrom: {secretKeyRef: {name: {{.Checkout}}-checkout, key: token}}}]
        {{- end}}
        volumeMounts: [{name: database, mountPath: /etc/flashsale/database}]
        securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
`))

func run(ctx context.Context, args []string) error {
	d := &demo{out: os.Stdout}
	flags := flag.NewFlagSet("demo run", flag.ExitOnError)
	flags.StringVar(&d.image, "image", "", "image of the operator and its pods")
	flags.StringVar(&d.shop, "shop-image", "", "image of the shoppers (this program)")
	flags.StringVar(&d.dsnFile, "dsn-file", "", "file with the DSN of a MySQL database that pods can reach")
	flags.IntVar(&d.clicks, "clicks", 100_000, "buyers who click once each")
	flags.BoolVar(&d.lonely, "without-operator", false, "take the operator away before the start, and bring it back after the payments")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	if err := d.play(ctx); err != nil {
		d.say("FAILED: %v", err)
		d.explain()
		return err
	}
	d.say("Well: 5 of 5 units sold, nobody before the start, every answer typed, the audit holds.")
	return nil
}

func (d *demo) play(ctx context.Context) error {
	if err := d.clean(ctx); err != nil {
		return err
	}
	d.start = time.Now().Add(30 * time.Second).Truncate(time.Second)
	d.say("Applying the sale: 5 units, opens at %s", d.start.UTC().Format(time.RFC3339))
	yaml := render(objects, map[string]string{"Start": d.start.UTC().Format(time.RFC3339)})
	d.print("%s\n", strings.TrimSpace(yaml))
	if _, err := d.kubectl(ctx, yaml, "apply", "-f", "-"); err != nil {
		return err
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	d.watch(watching)
	for _, phase := range []string{"Scheduled", "Warming"} {
		if err := d.waitForPhase(ctx, phase); err != nil {
			return err
		}
	}
	if err := d.until(ctx, "both reservation pods are ready", func() bool {
		return d.get(ctx, "{.status.reservers.summary}") == "2/2"
	}); err != nil {
		return err
	}
	if d.lonely {
		d.say("The operator goes away; the sale opens without it")
		defer func() { _ = d.scaleOperator(context.WithoutCancel(ctx), 1) }() // whatever happens
		if err := d.scaleOperator(ctx, 0); err != nil {
			return err
		}
	}
	d.say("%d buyers come", d.clicks)
	// By address: the demo does not depend on the cluster's DNS.
	ip, err := d.kubectl(ctx, "", "-n", namespace, "get", "service", sale+"-reserver", "-o", "jsonpath={.spec.clusterIP}")
	if err != nil {
		return err
	}
	err = d.startJob(ctx, "shop", d.shop, sale, []string{"/demo", "shop", "--url=http://" + ip, fmt.Sprint("--clicks=", d.clicks)})
	if err != nil {
		return err
	}
	if err := d.followShop(ctx); err != nil {
		return err
	}
	return d.end(ctx)
}

// followShop shows the shop's reports, and the sale after each.
func (d *demo) followShop(ctx context.Context) error {
	sold := false
	err := d.logs(ctx, "shop", func(line []byte) error {
		var r report
		if err := json.Unmarshal(line, &r); err != nil {
			return fmt.Errorf("the shop printed %q", line)
		}
		if r.Failure != "" {
			return errors.New(r.Failure)
		}
		d.say("%s", r.Text)
		switch r.Step {
		case "clicks":
			d.table(r)
		case "paid":
			if d.lonely {
				d.say("The operator comes back")
				return d.scaleOperator(ctx, 1)
			}
		case "sold":
			sold = true
		}
		return nil
	})
	if err == nil && !sold {
		err = errors.New("the shop ended early: kubectl -n flashsale-demo logs job/shop says why")
	}
	return err
}

// end waits for the close, and audits from outside.
func (d *demo) end(ctx context.Context) error {
	if err := d.waitForPhase(ctx, "Closed"); err != nil {
		return err
	}
	reason := d.get(ctx, `{.status.conditions[?(@.type=="Ready")].reason}`)
	if reason != "SoldOut" {
		return fmt.Errorf("the sale closed with reason %s, want SoldOut", reason)
	}
	opened, err := time.Parse(time.RFC3339, d.get(ctx, "{.status.openedAt}"))
	if err != nil || !opened.Equal(d.start.Truncate(time.Second)) {
		return fmt.Errorf("status.openedAt is %v, want %v", opened, d.start.Truncate(time.Second))
	}
	d.say("Auditing the rows")
	uid := d.get(ctx, "{.metadata.uid}")
	if err := d.startJob(ctx, "audit", d.image, "", []string{"/reserver", "audit", "--sale-id=" + uid}); err != nil {
		return err
	}
	var output bytes.Buffer
	if err := d.logs(ctx, "audit", func(line []byte) error { output.Write(line); return nil }); err != nil {
		return err
	}
	var audit struct {
		Available, Held, Sold int64
		OK                    bool
		Checks                []struct {
			ID, Claim string
			OK        bool
		}
	}
	if err := json.Unmarshal(output.Bytes(), &audit); err != nil {
		return fmt.Errorf("the audit printed %q: %w", output.String(), err)
	}
	for _, c := range audit.Checks {
		d.print("  %s  %-6v  %s\n", c.ID, map[bool]string{true: "holds", false: "BROKEN"}[c.OK], c.Claim)
	}
	if !audit.OK || audit.Sold != 5 || audit.Held != 0 || audit.Available != 0 {
		return fmt.Errorf("the audit does not hold: %d sold, %d held, %d available", audit.Sold, audit.Held, audit.Available)
	}
	return nil
}

// clean removes what an earlier run left, and makes namespace and Secret.
func (d *demo) clean(ctx context.Context) error {
	if _, err := d.kubectl(ctx, "", "-n", namespace, "delete", "--ignore-not-found", "--wait", "--timeout=60s", "flashsale/"+sale, "job/shop", "job/audit"); err != nil {
		return err
	}
	dsn, err := os.ReadFile(d.dsnFile)
	if err != nil {
		return err
	}
	secret, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]string{"name": "sales-db", "namespace": namespace},
		"stringData": map[string]string{"dsn": strings.TrimSpace(string(dsn))}})
	if err != nil {
		return err
	}
	ns := "apiVersion: v1\nkind: Namespace\nmetadata: {name: flashsale-demo, labels: {pod-security.kubernetes.io/enforce: restricted}}\n---\n"
	_, err = d.kubectl(ctx, ns+string(secret), "apply", "--server-side", "-f", "-") // client-side, the DSN would stand in an annotation
	return err
}

// startJob starts a pod, which has the token of the checkout of a sale, if one is named.
func (d *demo) startJob(ctx context.Context, name, image, checkout string, command []string) error {
	c, err := json.Marshal(command)
	if err != nil {
		return err
	}
	_, err = d.kubectl(ctx, render(job, map[string]string{"Name": name, "Image": image, "Checkout": checkout, "Command": string(c)}), "apply", "-f", "-")
	return err
}

// logs follows a job's log to its end. When the connection breaks it follows again, from the first line not yet seen.
func (d *demo) logs(ctx context.Context, name string, each func(line []byte) error) error {
	podPhase := func() string {
		phase, _ := d.kubectl(ctx, "", "-n", namespace, "get", "pods", "-l", "job-name="+name, "-o", "jsonpath={.items[0].status.phase}")
		return phase
	}
	seen := 0
	for {
		phase := ""
		err := d.until(ctx, "the pod of job "+name+" runs", func() bool {
			phase = podPhase()
			return phase == "Running" || phase == "Succeeded" || phase == "Failed"
		})
		if err != nil {
			return err
		}
		n, err := d.follow(ctx, name, seen, each)
		seen += n
		if err != nil || phase != "Running" {
			return err
		}
	}
}

// follow gives the lines after the first skip to each, and how many there were.
func (d *demo) follow(ctx context.Context, job string, skip int, each func(line []byte) error) (seen int, err error) {
	cmd := exec.CommandContext(ctx, "kubectl", "-n", namespace, "logs", "-f", "job/"+job)
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }() // what matters is what was read
	lines := bufio.NewScanner(pipe)
	lines.Buffer(nil, 1<<20)
	for n := 0; lines.Scan(); n++ {
		if n < skip {
			continue
		}
		seen++
		if err := each(lines.Bytes()); err != nil {
			return seen, err
		}
	}
	return seen, nil
}

func (d *demo) scaleOperator(ctx context.Context, replicas int) error {
	if _, err := d.kubectl(ctx, "", "-n", "flashsale-system", "scale", "deployment/flashsale-manager", fmt.Sprint("--replicas=", replicas)); err != nil {
		return err
	}
	if replicas > 0 {
		return nil
	}
	_, err := d.kubectl(ctx, "", "-n", "flashsale-system", "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/component=manager", "--timeout=60s")
	return err
}

func (d *demo) waitForPhase(ctx context.Context, phase string) error {
	return d.until(ctx, "the sale is "+phase, func() bool { return d.get(ctx, "{.status.phase}") == phase })
}

func (d *demo) until(ctx context.Context, what string, done func() bool) error {
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end) && ctx.Err() == nil; {
		if done() {
			return nil
		}
		time.Sleep(200 * time.Millisecond)
	}
	return fmt.Errorf("two minutes passed, and not yet: %s", what)
}

// watch prints the line of kubectl get flashsales whenever it changes, until the context ends.
func (d *demo) watch(ctx context.Context) {
	d.print("$ kubectl -n flashsale-demo get flashsales -w\n")
	go func() {
		last := ""
		for ctx.Err() == nil { // again, if the connection breaks
			cmd := exec.CommandContext(ctx, "kubectl", "-n", namespace, "get", "flashsales", "-w")
			pipe, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				return
			}
			for lines := bufio.NewScanner(pipe); lines.Scan(); {
				line := lines.Text()
				// The age is no news.
				if columns := strings.Fields(line); len(columns) > 1 && strings.Join(columns[:len(columns)-1], " ") != last {
					last = strings.Join(columns[:len(columns)-1], " ")
					d.print("%s\n", line)
				}
			}
			_ = cmd.Wait()
			time.Sleep(500 * time.Millisecond)
		}
	}()
}

func (d *demo) table(r report) {
	var table strings.Builder
	table.WriteString("  answer     count   p50 ms   p99 ms   max ms\n")
	for _, a := range r.Answers {
		if a.Count == 0 {
			fmt.Fprintf(&table, "  %-8s %7d        -        -        -\n", a.Kind, 0)
			continue
		}
		fmt.Fprintf(&table, "  %-8s %7d %8.1f %8.1f %8.1f\n", a.Kind, a.Count, a.P50, a.P99, a.Max)
	}
	d.print("%s%.0f answers/s; the first reservation was granted %.1f ms after the start, by the database's clock;\n"+
		"%d clicks were tried again after a 503 or a broken connection\n", table.String(), float64(d.clicks)/r.Seconds, r.SkewMS, r.Again)
}

// explain prints what helps to find out why.
func (d *demo) explain() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for _, args := range [][]string{
		{"-n", namespace, "describe", "flashsale", sale},
		{"-n", namespace, "get", "pods", "-o", "wide"},
		{"-n", namespace, "get", "events", "--sort-by=.lastTimestamp"},
		{"-n", namespace, "logs", "-l", "app.kubernetes.io/instance=" + sale, "--prefix", "--tail=20"},
		{"-n", "flashsale-system", "logs", "deployment/flashsale-manager", "--tail=40"},
	} {
		d.print("$ kubectl %s\n", strings.Join(args, " "))
		out, err := d.kubectl(ctx, "", args...)
		if err != nil {
			out = err.Error()
		}
		d.print("%s\n", out)
	}
}

func (d *demo) say(format string, args ...any) {
	d.print("\n%s  %s\n", time.Now().UTC().Format("15:04:05"), fmt.Sprintf(format, args...))
}

// print keeps the watch's lines and the story's apart.
func (d *demo) print(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, _ = fmt.Fprintf(d.out, format, args...)
}

// get gives a field of the sale, or nothing.
func (d *demo) get(ctx context.Context, path string) string {
	out, _ := d.kubectl(ctx, "", "-n", namespace, "get", "flashsale", sale, "-o", "jsonpath="+path)
	return out
}

// kubectl runs kubectl, again for half a minute while the API server does not answer.
func (d *demo) kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	for end := time.Now().Add(30 * time.Second); ; {
		out, err := kubectlOnce(ctx, stdin, args...)
		if err == nil || !noAnswer.MatchString(err.Error()) || ctx.Err() != nil || time.Now().After(end) {
			return out, err
		}
		time.Sleep(500 * time.Millisecond)
	}
}

var noAnswer = regexp.MustCompile(`refused|connection reset|EOF|etcdserver|i/o timeout|TLS handshake timeout`)

func kubectlOnce(ctx context.Context, stdin string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "kubectl", args...)
	cmd.Stdin = strings.NewReader(stdin)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

func render(t *template.Template, data any) string {
	var b strings.Builder
	if err := t.Execute(&b, data); err != nil {
		panic(err) // the templates are constants
	}
	return b.String()
}
